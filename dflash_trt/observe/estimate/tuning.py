# SPDX-License-Identifier: Apache-2.0
"""The settings with the highest throughput per GPU that give each user the requested speed."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from dflash_trt.deploy.batch_schedule import Schedule
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile
from dflash_trt.observe.estimate.constants import Band, Influence, Rates, rates, vary
from dflash_trt.observe.estimate.curve import BATCHES, Traffic, point
from dflash_trt.observe.estimate.measured_points import MeasuredPoints, PredictedPoint
from dflash_trt.observe.estimate.report import batch_limit
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import StepModel

Price = Callable[[int, int], float]
"""Tokens a second of one user by batch and draft length."""
TIE = 0.02
"""A shorter schedule is preferred if it costs less than this."""


def schedule_for(price: Price, largest: int, lengths: Sequence[int], slo: float) -> Schedule:
    """Draft lengths by batch up to `largest`; a length is kept as long as it keeps the speed and none is better by more
    than TIE.

    Runtimes draft at most the first length. It is the best for one user that keeps the speed at every batch; if there
    is none, the best for one user.
    """
    starts = [batch for batch in BATCHES if batch < largest] + [largest]
    ends = [start - 1 for start in starts[1:]] + [largest]
    prices = {batch: {k: price(batch, k) for k in lengths} for batch in {*starts, *ends}}
    tried: list[Schedule] = []
    for first in sorted(lengths, key=lambda k: (-prices[1][k], k)):
        schedule: list[tuple[int, int]] = [(1, first)]
        keeps = True
        for start, end in zip(starts, ends, strict=True):
            slowest = {k: min(prices[start][k], prices[end][k]) for k in lengths if k <= first}
            top = max(slowest, key=lambda k: (slowest[k] >= slo, prices[start][k], -k))
            last = schedule[-1][1]
            is_better = slowest[last] < slo <= slowest[top] or prices[start][last] * (1 + TIE) < prices[start][top]
            if start > 1 and is_better:
                schedule.append((start, top))
            keeps = keeps and slowest[schedule[-1][1]] >= slo
        if keeps:
            return tuple(schedule)
        tried.append(tuple(schedule))
    return tried[0]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to deploy, at the largest batch that keeps users at their speed."""

    tensor_parallel: int
    expert_parallel: int
    recipe: str
    batch: int
    num_draft_tokens: int
    """Draft length at that batch; 0 disables speculation."""
    user_rate: float
    gpu_rate: float
    limit: str
    """The limit on the batch: "speed", or a `BatchLimit`'s reason."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    num_gpus: int | None = None
    """All available GPUs, on one or more nodes; None: no limit."""
    request_rate: float | None = None
    """Requests per second of all servers together; None: as many as they can serve."""
    output_tokens: int
    """Output tokens of a request."""

    def replicas(self, candidate: Candidate) -> int:
        """Servers of a candidate: enough for the rate, else as many as the GPUs hold; 0 if neither is possible."""
        most = None if self.num_gpus is None else self.num_gpus // candidate.tensor_parallel
        if self.request_rate is None:
            return 1 if most is None else most
        needed = math.ceil(self.request_rate / self.server_rate(candidate))
        return needed if most is None or needed <= most else 0

    def server_rate(self, candidate: Candidate) -> float:
        """Requests a second of one server."""
        return candidate.batch * candidate.user_rate / self.output_tokens

    def price(self, candidate: Candidate) -> float:
        """The objective to minimise: the GPUs needed for the rate, or without a rate the negated throughput of all
        GPUs.
        """
        replicas = self.replicas(candidate)
        if self.request_rate is not None:
            return float(replicas * candidate.tensor_parallel)
        return -replicas * self.server_rate(candidate)


WORTH = 0.02
"""Minimum gain of a quantised recipe over bf16 before it is proposed, because it costs acceptance (see `verify`)."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate, what it needs at smaller batches, and the runners-up."""

    slo: float
    best: Candidate
    schedule: Schedule
    """Smallest batch and drafts from there on, up to the best batch; each keeps the speed up to the next."""
    user_rate: Band
    gpu_rate: Band
    influences: list[Influence]
    others: list[Candidate]
    """The best of every other way to deploy, best first."""
    measured: tuple[PredictedPoint, ...]
    """Points of --from used instead of the model, with the model's predictions for them."""
    model_error: float | None
    """Error of the model against them: the median of |predicted / measured - 1|."""
    model_factor: float
    """Factor on the model's prediction for unmeasured points: the median of measured / predicted, or 1."""
    break_even: float
    """Accepted share of drafts below which plain decoding is predicted to be faster at every batch of the schedule."""
    replicas: int = 1
    """Servers of `best` in the fleet."""


def tune(
    systems: Mapping[str, System], traffic: Traffic, acceptance: AcceptanceProfile, slo: float, *,
    lengths: Sequence[int] | None = None, measured: MeasuredPoints | None = None, is_scheduled: bool = True,
    fleet: Fleet | None = None,
) -> Tuning:  # fmt: skip
    """The best of `systems` (by recipe) over ranks, batch and draft length; with a `fleet`, the best for all servers.

    `measured` points replace the model for the systems' parallelism. Raises ConfigError if no setting reaches `slo`,
    naming the fastest, or if the fleet has too few GPUs.
    """
    candidates: list[Candidate] = []
    fastest = 0.0
    for recipe, system in systems.items():
        for variant in _parallelisms(system, is_fixed=measured is not None):
            price = _price(variant, traffic, acceptance, rates(variant.gpu, variant.runtime), measured)
            fastest = max(fastest, max(price(1, k) for k in _lengths(variant, lengths)))
            candidates += _candidates(variant, recipe, price, traffic, slo, _lengths(variant, lengths))
    if not candidates:
        raise ConfigError(
            f"no setting reaches {slo:g} tokens/s per user; a single user gets at most {fastest:.0f}",
            hint="ask for less, or see in `dflash-trt estimate` where the time goes",
        )
    if fleet is not None:
        candidates = _affordable(candidates, fleet)
    candidates.sort(key=lambda candidate: (0.0 if fleet is None else fleet.price(candidate), -candidate.gpu_rate))
    best = chosen = _prefer_unquantized(candidates, fleet)
    variant = _variant(systems[best.recipe], best.tensor_parallel, best.expert_parallel)
    nominal = rates(variant.gpu, variant.runtime)
    price = _price(variant, traffic, acceptance, nominal, measured)
    schedule: Schedule = ((1, best.num_draft_tokens),)
    if is_scheduled:
        schedule = schedule_for(price, best.batch, _lengths(variant, lengths), slo)
        length = schedule[-1][1]  # at the largest batch, so that the promise matches the file
        rate = price(best.batch, length)
        gpu_rate = best.batch * rate / best.tensor_parallel
        best = msgspec.structs.replace(best, num_draft_tokens=length, user_rate=rate, gpu_rate=gpu_rate)

    def predict(moved: Rates) -> list[float]:
        return [_price(variant, traffic, acceptance, moved, measured)(best.batch, best.num_draft_tokens)]

    bands, influences = vary(variant.gpu, variant.runtime, predict)
    scale = best.batch / best.tensor_parallel
    model = _price(variant, traffic, acceptance, nominal, None)
    comparisons = () if measured is None else measured.compare(model)
    return Tuning(
        slo=slo, best=best, schedule=schedule, user_rate=bands[0],
        gpu_rate=Band(bands[0].value * scale, bands[0].low * scale, bands[0].high * scale),
        influences=influences, others=[candidate for candidate in candidates if candidate is not chosen],
        measured=comparisons, break_even=_break_even(variant, traffic, acceptance, schedule, best.batch),
        model_error=statistics.median(abs(comparison.error) for comparison in comparisons) if comparisons else None,
        model_factor=_factor(model, measured), replicas=1 if fleet is None else fleet.replicas(best),
    )  # fmt: skip


def _break_even(
    system: System, traffic: Traffic, acceptance: AcceptanceProfile, schedule: Schedule, largest: int
) -> float:
    """The smallest share over batches: 1 + K * share tokens take as long as a step with K drafts, and 1 a plain one."""
    model = StepModel(system, rates(system.gpu, system.runtime))
    shares = []
    for batch in (size for size in BATCHES if size <= largest):
        length = next(length for begin, length in reversed(schedule) if begin <= batch)
        if length:
            drafting = point(model, "dflash", acceptance, traffic, batch, length).step_seconds
            plain = point(model, "none", None, traffic, batch, 0).step_seconds
            shares.append((drafting / plain - 1) / length)
    return max(0.0, min(shares, default=0.0))


def _affordable(candidates: Sequence[Candidate], fleet: Fleet) -> list[Candidate]:
    """Candidates of which enough servers fit the fleet's GPUs."""
    if affordable := [candidate for candidate in candidates if fleet.replicas(candidate)]:
        return affordable
    unlimited = msgspec.structs.replace(fleet, num_gpus=None)
    fewest = min(unlimited.replicas(candidate) * candidate.tensor_parallel for candidate in candidates)
    asked = "a server" if fleet.request_rate is None else f"{fleet.request_rate:g} requests/s"
    raise ConfigError(f"{asked} needs at least {fewest} GPUs; --gpus is {fleet.num_gpus}")


def _parallelisms(system: System, *, is_fixed: bool) -> Iterator[System]:
    """Ranks that divide the GPUs, each with experts shared and divided; measured points are of one of them."""
    if is_fixed:
        yield system
        return
    heads, draft = system.target.num_attention_heads, system.draft
    assert draft is not None, "a deployment has one"
    is_shared_engine = draft.runs_whole_block and system.drafter_ranks > 1
    for ranks in (1, 2, 4, 8):
        if ranks <= system.num_gpus and system.num_gpus % ranks == 0 and heads % ranks == 0:
            if is_shared_engine and draft.num_key_value_heads % ranks:
                continue
            for expert_ranks in sorted({1, ranks} if system.target.num_experts else {1}):
                yield _variant(system, ranks, expert_ranks)


def _variant(system: System, ranks: int, expert_ranks: int) -> System:
    return msgspec.structs.replace(
        system,
        num_gpus=ranks,
        tensor_parallel=ranks,
        expert_parallel=expert_ranks,
        drafter_ranks=1 if system.drafter_ranks == 1 and system.draft and system.draft.runs_whole_block else ranks,
    )


def _lengths(system: System, lengths: Sequence[int] | None) -> list[int]:
    """Draft lengths to choose from; without 0 for TensorRT-LLM, whose worker stores no context in plain steps."""
    assert system.draft is not None
    plain = [] if system.runtime == "trtllm" else [0]
    return [*plain, *(lengths or range(1, system.draft.max_draft_tokens + 1))]


def _price(
    system: System, traffic: Traffic, acceptance: AcceptanceProfile, moved: Rates, measured: MeasuredPoints | None
) -> Price:
    model = StepModel(system, moved)

    def predicted(batch: int, num_draft_tokens: int) -> float:
        return point(model, "dflash", acceptance, traffic, batch, num_draft_tokens).user_rate

    factor = _factor(predicted, measured)

    def user_rate(batch: int, num_draft_tokens: int) -> float:
        if measured is not None and (rate := measured.user_rate(batch, num_draft_tokens)) is not None:
            return rate
        return factor * predicted(batch, num_draft_tokens)

    return user_rate


def _factor(model: Price, measured: MeasuredPoints | None) -> float:
    """measured / predicted, so that measured and unmeasured points are compared on one scale."""
    if measured is None:
        return 1.0
    return statistics.median(1 / (1 + comparison.error) for comparison in measured.compare(model))


def _candidates(
    system: System, recipe: str, price: Price, traffic: Traffic, slo: float, lengths: Sequence[int]
) -> Iterator[Candidate]:
    """The largest batch that keeps the speed, with its best draft length; None if even a single user is too slow."""

    def best_length(batch: int) -> tuple[float, int]:
        allowed = [k for k in lengths if batch * (k + 1) <= system.max_num_tokens]
        return max((price(batch, k), -k) for k in allowed)

    memory = batch_limit(system, "dflash", traffic.max_tokens)
    if memory.batch < 1 or best_length(1)[0] < slo:
        return
    batches = [batch for batch in BATCHES if batch <= memory.batch]
    index = next((i for i, batch in enumerate(batches) if best_length(batch)[0] < slo), len(batches)) - 1
    low = batches[index]
    high = batches[index + 1] if index + 1 < len(batches) else memory.batch
    # Between two batches of the grid, to the request.
    low += bisect_left(range(low + 1, high + 1), True, key=lambda batch: best_length(batch)[0] < slo)
    rate, length = best_length(low)
    yield Candidate(
        tensor_parallel=system.tensor_parallel, expert_parallel=system.expert_parallel, recipe=recipe,
        batch=low, num_draft_tokens=-length, user_rate=rate, gpu_rate=low * rate / system.num_gpus,
        limit=memory.reason if low == memory.batch else "speed",
    )  # fmt: skip


def _prefer_unquantized(candidates: Sequence[Candidate], fleet: Fleet | None) -> Candidate:
    """The best; bf16 replaces a recipe that gains less than WORTH over it and saves the fleet nothing."""
    best = candidates[0]
    for candidate in candidates:
        is_as_cheap = fleet is None or math.isclose(fleet.price(candidate), fleet.price(best), rel_tol=WORTH)
        if candidate.recipe == "bf16" and is_as_cheap and candidate.gpu_rate * (1 + WORTH) >= best.gpu_rate:
            return candidate
    return best
