# SPDX-License-Identifier: Apache-2.0
"""Points of a bench run in place of the model: batch is the concurrency, speed the median user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.bench.run_record import BenchRun
from dflash_trt.observe.estimate.shapes import System

RUNTIMES = {"tensorrt-llm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
WHOLE = 0.1  # drafts a pass that may be missing from the draft length, where answers end


class MeasuredPoint(msgspec.Struct, frozen=True):
    batch: int
    num_draft_tokens: int
    user_rate: float
    """Tokens a second of one user."""


class PredictedPoint(msgspec.Struct, frozen=True):
    """A measurement, and the model's speed of a user there."""

    measured: MeasuredPoint
    predicted_rate: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_rate / self.measured.user_rate - 1


class MeasuredPoints(msgspec.Struct, frozen=True):
    points: tuple[MeasuredPoint, ...]

    def user_rate(self, batch: int, num_draft_tokens: int) -> float | None:
        """The measured speed at that batch, or on the line between the two measured around it; None outside."""
        speeds = {point.batch: point.user_rate for point in self.points if point.num_draft_tokens == num_draft_tokens}
        below, above = (max((b for b in speeds if b <= batch), default=None),
                        min((b for b in speeds if b >= batch), default=None))  # fmt: skip
        if below is None or above is None:
            return None
        if below == above:
            return speeds[below]
        share = (batch - below) / (above - below)
        # Steps grow with the batch in straight lines, more nearly than speeds fall.
        return 1 / ((1 - share) / speeds[below] + share / speeds[above])

    def compare(self, model: Callable[[int, int], float]) -> tuple[PredictedPoint, ...]:
        """Every point, and what the model says of it."""
        return tuple(PredictedPoint(point, model(point.batch, point.num_draft_tokens)) for point in self.points)


def measured_points(path: Path, system: System) -> MeasuredPoints:
    """The points of a run's directory; raises ConfigError for another machine's run, or none."""
    run = read_run(path)
    _check(path, run, system)
    points = []
    for point in read_points(path, run):
        if point.method != "none" and not point.method.startswith("dflash"):
            continue  # another method's speeds are not of these settings
        if point.category is None and point.user_rate:
            points.append(MeasuredPoint(point.concurrency, _draft_length(path, point), point.user_rate))
    if not points:
        raise ConfigError(
            f"{path} has no point of the methods none or dflash on all prompts",
            hint="`dflash-trt bench run --pooled` measures categories together",
        )
    return MeasuredPoints(tuple(points))


def _check(path: Path, run: BenchRun, system: System) -> None:
    """Checks that the run's GPUs and runtimes, if recorded, are the deployment's."""
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
    acceptance, counts = point.acceptance, point.acceptance.counts
    if counts is None or not counts.drafting_passes or counts.proposed is None:
        raise ConfigError(
            f"{path}: {point.method} at {point.concurrency} requests: expected the server's counts of passes and"
            f" drafts, found {acceptance.source}: {acceptance.how}"
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
