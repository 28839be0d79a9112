# SPDX-License-Identifier: Apache-2.0
"""The points of a bench run as `tune --from` takes them: batch is the requests at once, speed the median user's."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import BenchPoint, BenchRun
from dflash_trt.observe.bench.run_directory import read_points as read_run_points
from dflash_trt.observe.bench.run_directory import read_run
from dflash_trt.observe.estimate.measured_points import SCHEMA, MeasuredPoint, MeasuredPoints, read_points
from dflash_trt.observe.estimate.shapes import System

RUNTIMES = {"tensorrt-llm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
WHOLE = 0.1  # drafts a pass that may be missing from the draft length, where answers end


def open_points(path: Path, system: System) -> MeasuredPoints:
    """Of a run's directory, or of a document of points; raises ConfigError for what was measured elsewhere."""
    if not path.is_dir():
        return read_points(path)
    run = read_run(path)
    _check(path, run, system)
    points = []
    for point in read_run_points(path, run):
        if point.method != "none" and not point.method.startswith("dflash"):
            continue  # another method's speeds are not of these settings
        user = point.user_tokens_per_second
        if point.category is None and user is not None and user.p50:
            points.append(MeasuredPoint(point.concurrency, _draft_length(path, point), user.p50))
    if not points:
        raise ConfigError(
            f"{path}: expected a point of the method none or dflash on all prompts, found none",
            hint="`dflash-trt bench run --pooled` measures categories together",
        )
    return MeasuredPoints(SCHEMA, tuple(points))


def _check(path: Path, run: BenchRun, system: System) -> None:
    """The run's GPUs and runtimes, where it tells them, are the deployment's."""
    if run.num_gpus is not None and run.num_gpus != system.num_gpus:
        raise ConfigError(f"{path}: expected a run on the deployment's {system.num_gpus} GPUs, found {run.num_gpus}")
    for method in run.methods:
        runtime = RUNTIMES.get(method.runtime)
        if runtime is not None and runtime != system.runtime:
            raise ConfigError(
                f"{path}: {method.name}: expected a run of {system.runtime}, found {runtime}",
                hint=f"add --runtime {runtime}",
            )


def _draft_length(path: Path, point: BenchPoint) -> int:
    """Drafts that each verify pass of the point had; raises ConfigError where they varied, or are not published."""
    if point.method == "none":
        return 0
    found, counts = point.acceptance, point.acceptance.counts
    if counts is None or not counts.drafting_passes or counts.proposed is None:
        raise ConfigError(
            f"{path}: {point.method} at {point.concurrency} requests: expected the server's counts of passes and"
            f" drafts, found {found.source}: {found.why or found.how or 'no pass'}"
        )
    mean = counts.proposed / counts.drafting_passes
    length = len(counts.accepted_by_position) or round(mean)
    if not length - WHOLE <= mean <= length:
        raise ConfigError(
            f"{path}: {point.method} at {point.concurrency} requests: expected passes of one draft length, found"
            f" {mean:.2f} drafts a pass on average, of up to {length}",
            hint="measure with a fixed length: `bench run --draft-length K`, or the server's own setting",
        )
    return length
