# SPDX-License-Identifier: Apache-2.0
"""Throughput per GPU against tokens a second of one user, for each method over batch and draft length.

Acceptance by draft length comes from one tau, or from what `verify` measured. Points of a bench run stand in place of
the model: batch is the concurrency, speed the median user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.bench.records import BenchPoint, BenchRun
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.estimate.shapes import Method, System
from dflash_trt.observe.estimate.step import StepLoad, StepModel
from dflash_trt.observe.plots.curves import rate_between

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class AcceptanceProfile(msgspec.Struct, frozen=True):
    """Probability that a draft is accepted once all earlier ones were, by position."""

    shares: tuple[float, ...]

    def tau(self, num_draft_tokens: int) -> float:
        """Tokens of a pass that verifies K drafts, the bonus included: 1 + p1 + p1 p2 + ..., from 1 to K + 1.

        Positions beyond the measured ones are accepted as often as the last one.
        """
        tokens = reached = 1.0
        for position in range(num_draft_tokens):
            reached *= self.shares[min(position, len(self.shares) - 1)]
            tokens += reached
        return tokens


def from_tau(tau: float, num_draft_tokens: int) -> AcceptanceProfile:
    """The profile, equal at every position, that gives `tau`; raises ConfigError for an impossible tau."""
    if not 1 <= tau <= num_draft_tokens + 1:
        raise ConfigError(f"tau: expected 1 to {num_draft_tokens + 1} for {num_draft_tokens} drafts, found {tau:g}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if AcceptanceProfile((middle,)).tau(num_draft_tokens) < tau else (low, middle)
    return AcceptanceProfile((high,))


class _Position(msgspec.Struct, frozen=True):
    position: int
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


class _Engine(msgspec.Struct, frozen=True):
    acceptance: list[_Position]


class _Report(msgspec.Struct, frozen=True):
    schema: str
    engine: _Engine


def read_acceptance(file: Path, num_draft_tokens: int) -> AcceptanceProfile:
    """The profile in a document of `verify --json`; raises ConfigError unless it is for K `num_draft_tokens`."""
    hint = "dflash-trt verify ENGINE --target TARGET --prompts FILE --json > verify.json"
    report = read_json(file, _Report, ConfigError, what="the document of `dflash-trt verify --json`", hint=hint)
    if not report.schema.startswith("dflash-trt/verify/"):
        raise ConfigError(f"{file}: expected a document of dflash-trt verify, found one of {report.schema!r}")
    shares = [entry.share for entry in sorted(report.engine.acceptance, key=lambda entry: entry.position)]
    if len(shares) != num_draft_tokens:
        raise ConfigError(f"{file}: expected acceptance of {num_draft_tokens} drafts, found {len(shares)}", hint=hint)
    judged = tuple(share for share in shares if share is not None)
    if not judged:
        raise ConfigError(f"{file}: no verify pass judged a draft")
    return AcceptanceProfile(judged)


def read_routing(file: Path, num_experts: int) -> Sequence[float]:
    """Measured routing: a JSON list with how often each expert was taken, in any unit."""
    counts = read_json(file, list[float], ConfigError, what=f"a JSON list of {num_experts} counts")
    if len(counts) != num_experts or min(counts) < 0 or not sum(counts) > 0:
        raise ConfigError(f"{file}: expected {num_experts} counts, none negative, found {len(counts)}")
    return counts


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 1024
    output_tokens: int = 1024

    @property
    def mean_context(self) -> float:
        """Tokens in a request's cache, averaged over its answer."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def max_tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.output_tokens


class OperatingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run, in steady state."""

    method: Method
    batch: int
    num_draft_tokens: int
    tau: float
    step_seconds: float
    user_rate: float
    """Tokens a second of one user, prefill of the others included."""
    gpu_rate: float
    """Output tokens a second of one GPU."""


def point(
    model: StepModel, method: Method, acceptance: AcceptanceProfile | None, traffic: Traffic, batch: int,
    num_draft_tokens: int,
) -> OperatingPoint:  # fmt: skip
    """One way to run: B requests that are replaced as they end, their prompts processed during the others' steps."""
    tau = 1.0 if acceptance is None or not num_draft_tokens else acceptance.tau(num_draft_tokens)
    load = StepLoad(batch=batch, num_draft_tokens=num_draft_tokens, context=traffic.mean_context)
    seconds = model.price(method, load).seconds
    # Whole prompts arrive every few steps; once every step has one, in ever larger chunks.
    arriving = batch * tau / traffic.output_tokens * traffic.prompt_tokens
    chunk = max(arriving, float(min(traffic.prompt_tokens, model.system.max_num_tokens)))
    mixed = msgspec.structs.replace(load, prompt_tokens=round(chunk), prompts=chunk / traffic.prompt_tokens)
    seconds += arriving / chunk * (model.price(method, mixed).seconds - seconds)
    rate = tau / seconds
    return OperatingPoint(
        method=method, batch=batch, num_draft_tokens=num_draft_tokens, tau=tau, step_seconds=seconds, user_rate=rate,
        gpu_rate=batch * rate / model.system.num_gpus,
    )  # fmt: skip


def points(
    model: StepModel, method: Method, acceptance: AcceptanceProfile | None, traffic: Traffic, max_batch: int,
    lengths: Sequence[int] | None = None,
) -> list[OperatingPoint]:  # fmt: skip
    """Every batch up to `max_batch` with every draft length of the method (all unless given)."""
    draft = model.system.drafter(method)
    chosen = (0,) if draft is None else lengths or range(1, draft.max_draft_tokens + 1)
    return [
        point(model, method, acceptance, traffic, batch, length)
        for batch in (size for size in BATCHES if size <= max_batch)
        for length in chosen
    ]


def rate_at(front: Sequence[OperatingPoint], user_rate: float) -> float:
    """Throughput per GPU of a frontier where users get `user_rate`, between points linearly; 0 beyond its end."""
    if not front or user_rate > front[0].user_rate:
        return 0.0
    rate = rate_between(front, user_rate)
    return front[-1].gpu_rate if rate is None else rate


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
        user = point.user_tokens_per_second
        if point.category is None and user is not None and user.p50:
            points.append(MeasuredPoint(point.concurrency, _draft_length(path, point), user.p50))
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
            f" drafts, found {acceptance.source}: {acceptance.why or acceptance.how or 'no pass'}"
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
