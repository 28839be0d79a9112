# SPDX-License-Identifier: Apache-2.0
"""The curve of each method, and how many times the throughput one gives where users get the same speed.

Intervals: completed requests are resampled with replacement NUM_SAMPLES times, and each figure is computed from every
sample; an interval spans the middle 95 %. That is the spread between prompts, not between runs, machines or days.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.observe.bench.records import BenchPoint, RequestRow
from dflash_trt.observe.bench.run_directory import MethodSeries, Workload
from dflash_trt.observe.plots.curves import frontier, rate_between

ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
ANNOUNCED_SPEED = 550.0  # tokens/s/user: the middle of the announcement's range
NUM_SAMPLES = 1000
ENDS = (2.5, 97.5)
Samples = NDArray[np.float64]


def interval(values: Samples) -> tuple[float, float] | None:
    """The middle 95 % of `values` [NUM_SAMPLES]; None where some sample gave no figure."""
    if not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, ENDS)
    return float(low), float(high)


def request_rate(rows: Sequence[RequestRow]) -> float | None:
    """Tokens a second of one request, from sending it to its last token: sum of tokens / sum of seconds."""
    seconds = sum(row.seconds for row in rows)
    return sum(row.output_tokens for row in rows) / seconds if seconds else None


def request_rates(rows: Sequence[RequestRow], seed: int, name: str) -> Samples:
    """`request_rate` of each sample; `name` makes samples of different rows independent."""
    indices = _resample(len(rows), seed, name)
    tokens = np.array([row.output_tokens for row in rows], dtype=float)
    seconds = np.array([row.seconds for row in rows])
    return _divide(tokens[indices].sum(axis=1), seconds[indices].sum(axis=1))


def point_rates(point: BenchPoint, seed: int, name: str) -> tuple[Samples, Samples]:
    """(one user's speed, throughput) of each sample: the point's own figures, moved as its requests move."""
    indices = _resample(len(point.rows), seed, name)
    tokens = np.array([row.output_tokens for row in point.rows], dtype=float)
    seconds = np.array([row.seconds for row in point.rows])
    whole = _divide(tokens[indices].sum(axis=1), seconds[indices].sum(axis=1)) / _divide(tokens.sum(), seconds.sum())
    waits = np.array([np.nan if row.ttft_seconds is None else row.ttft_seconds for row in point.rows])
    user = np.where(tokens > 1, _divide(tokens - 1, seconds - waits), np.nan)
    measured = user[np.isfinite(user)]
    if point.user_tokens_per_second is None or not len(measured):
        return np.full(NUM_SAMPLES, np.nan), point.output_tokens_per_second * whole
    medians = np.median(measured[_resample(len(measured), seed, name)], axis=1)
    return point.user_tokens_per_second.p50 * medians / np.median(measured), point.output_tokens_per_second * whole


def _resample(count: int, seed: int, name: str) -> NDArray[np.int64]:
    """Indices [NUM_SAMPLES, count] of resampled rows; the same for the same seed and name."""
    generator = np.random.default_rng((abs(seed), zlib.crc32(name.encode())))
    return generator.integers(count, size=(NUM_SAMPLES, count))


def _divide(above: Samples | np.float64, below: Samples | np.float64) -> Samples:
    """NaN where `below` is not above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) > 0, np.divide(above, below), np.nan)


class SpeedPoint(msgspec.Struct, frozen=True):
    user_rate: float
    """Tokens a second of one user, the median over requests."""
    gpu_rate: float
    """Tokens a second of all users, per GPU or per server."""
    concurrency: int


class SpeedCurve(msgspec.Struct, frozen=True):
    name: str
    title: str
    points: tuple[SpeedPoint, ...]
    """All that are measured, by concurrency."""
    front: tuple[SpeedPoint, ...]
    """Points that no other beats, fastest user first; speeds are interpolated between them."""


class MeasuredSpeedup(msgspec.Struct, frozen=True):
    """A method's throughput over another's."""

    value: float | None
    interval: tuple[float, float] | None = None
    why: str | None = None
    """Why there is none."""


class AtSpeed(msgspec.Struct, frozen=True):
    """All methods where each user gets `user_rate`."""

    user_rate: float
    gpu_rates: dict[str, float | None]
    """Between measured points; None where a curve does not reach it."""
    factors: dict[str, MeasuredSpeedup]
    """Over the reference."""


def num_gpus(workload: Workload) -> int | None:
    """GPUs that throughput is divided by, if every run states them."""
    counts = [series.run.num_gpus for series in workload.series]
    return None if None in counts else max(count or 1 for count in counts)


def gpus_of(series: MethodSeries, workload: Workload) -> int:
    """The divisor of that series: its own GPUs, or 1 where throughput is per server."""
    return 1 if num_gpus(workload) is None else series.run.num_gpus or 1


def curve(series: MethodSeries, gpus: int) -> SpeedCurve:
    """The curve through all points where a user's speed is known."""
    points = tuple(
        SpeedPoint(point.user_tokens_per_second.p50, point.output_tokens_per_second / gpus, point.concurrency)
        for point in series.points
        if point.user_tokens_per_second is not None and point.user_tokens_per_second.p50 and point.output_tokens
    )
    return SpeedCurve(series.name, series.title, points, tuple(frontier(points)))


def speeds(curves: Sequence[SpeedCurve]) -> tuple[float, ...]:
    """Round speeds over what some curve covers and over what all cover; the announcement's where one reaches it."""
    ranges = [(line.front[-1].user_rate, line.front[0].user_rate) for line in curves if line.front]
    if not ranges:
        return ()
    lowest, highest = min(slow for slow, _ in ranges), max(fast for _, fast in ranges)
    chosen = _round_speeds(lowest, highest, 4) | _round_speeds(max(s for s, _ in ranges), min(f for _, f in ranges), 2)
    if lowest <= ANNOUNCED_SPEED <= highest:
        chosen.add(ANNOUNCED_SPEED)
    return tuple(sorted(chosen))


def _round_speeds(low: float, high: float, parts: int) -> set[float]:
    """At the ends of about `parts` equal parts; none where `low` is not below `high`."""
    if low >= high:
        return set()
    share = (high - low) / parts
    power = 10 ** math.floor(math.log10(share))
    step = next(factor * power for factor in ROUND if factor * power >= share)
    return {step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)}


def at_speeds(workload: Workload, user_rates: Sequence[float], seed: int) -> tuple[AtSpeed, ...]:
    """Every method at those speeds of a user, and its factor over the reference."""
    curves = {series.name: curve(series, gpus_of(series, workload)) for series in workload.series}
    draws = {series.name: _resampled_fronts(workload, series, seed) for series in workload.series}
    return tuple(_at_speed(workload, curves, draws, user_rate) for user_rate in user_rates)


def _at_speed(
    workload: Workload, curves: dict[str, SpeedCurve], draws: dict[str, list[list[SpeedPoint]]], user_rate: float
) -> AtSpeed:
    rates = {name: rate_between(line.front, user_rate) for name, line in curves.items()}
    factors = {}
    for series in workload.compared():
        reference = workload.reference
        rate, plain_rate = rates[series.name], rates.get(reference)
        if reference not in curves:
            factors[series.name] = MeasuredSpeedup(None, why=f"{workload.reference_title} was not measured")
        elif rate is None or plain_rate is None:
            missing = [curves[name] for name in (series.name, reference) if rates[name] is None]
            factors[series.name] = MeasuredSpeedup(
                None, why="; ".join(_does_not_reach(line, user_rate) for line in missing)
            )
        else:
            samples = [_rates_between(draws[name], user_rate) for name in (series.name, reference)]
            factors[series.name] = MeasuredSpeedup(rate / plain_rate, interval(samples[0] / samples[1]))
    return AtSpeed(user_rate, rates, factors)


def ends(line: SpeedCurve, per: str) -> str:
    """The ends of a curve, in words."""
    if not line.front:
        return f"{line.title}: no point"
    fast, slow = line.front[0], line.front[-1]
    if fast == slow:
        return f"{line.title}: one point, {_place(fast, per)}"
    return f"{line.title}: from {_place(fast, per)} to {_place(slow, per)}"


def _place(point: SpeedPoint, per: str) -> str:
    return (
        f"{point.user_rate:,.0f} tokens/s/user, {point.gpu_rate:,.1f} tokens/s/{per} (concurrency {point.concurrency})"
    )


def _does_not_reach(line: SpeedCurve, user_rate: float) -> str:
    if not line.front:
        return f"{line.title} has no point"
    is_fast = user_rate > line.front[0].user_rate
    end = line.front[0 if is_fast else -1]
    word = "does not reach it: its fastest" if is_fast else "was not measured there: its slowest"
    return f"{line.title} {word} point is {end.user_rate:,.0f} tokens/s/user at concurrency {end.concurrency}"


def _resampled_fronts(workload: Workload, series: MethodSeries, seed: int) -> list[list[SpeedPoint]]:
    """The frontier of each resample of every point's requests."""
    gpus = gpus_of(series, workload)
    points = [p for p in series.points if p.user_tokens_per_second is not None and p.requests.completed]
    draws = [point_rates(p, seed, f"{series.name}/{p.category}/{p.concurrency}") for p in points]
    fronts = []
    for index in range(NUM_SAMPLES):
        sample = [SpeedPoint(float(users[index]), float(rates[index]) / gpus, 0) for users, rates in draws]
        fronts.append(frontier(p for p in sample if math.isfinite(p.user_rate)))
    return fronts


def _rates_between(fronts: Sequence[Sequence[SpeedPoint]], user_rate: float) -> Samples:
    """Throughput of each resample at that speed; NaN where its curve does not reach it."""
    rates = [rate_between(front, user_rate) for front in fronts]
    return np.array([np.nan if rate is None else rate for rate in rates])
