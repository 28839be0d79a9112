# SPDX-License-Identifier: Apache-2.0
"""Throughput against the speed of one user: the curve of each method, and all methods at equal speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from dflash_trt.observe.bench.report.intervals import NUM_SAMPLES, Samples, Speedup, point_rates, speedups
from dflash_trt.observe.bench.report.workloads import MethodSeries, Workload
from dflash_trt.observe.plots.frontier import frontier, rate_between

ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
ANNOUNCED_SPEED = 550.0  # tokens/s/user: the middle of the announcement's range


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


def curve(workload: Workload, series: MethodSeries) -> SpeedCurve:
    """The curve through all points at which the speed of a user is known."""
    points = tuple(
        SpeedPoint(point.user_rate, workload.gpu_rate(series, point), point.concurrency)
        for point in series.points
        if point.user_rate and point.output_tokens
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


def ends(line: SpeedCurve, per: str) -> str:
    """Both ends of a curve, as a sentence."""
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


Front = Sequence[SpeedPoint]


class AtSpeed(msgspec.Struct, frozen=True):
    """All methods where each user gets `user_rate`."""

    user_rate: float
    gpu_rates: dict[str, float | None]
    """Interpolated between measured points; None where a curve does not reach the speed."""
    factors: dict[str, Speedup]
    """Over the reference, where both curves reach the speed."""


def at_speeds(workload: Workload, user_rates: Sequence[float], seed: int) -> tuple[AtSpeed, ...]:
    """Every method at those speeds of a user, and its factor over the reference."""
    fronts = {series.name: curve(workload, series).front for series in workload.series}
    draws = {series.name: _resampled_fronts(workload, series, seed) for series in workload.series}
    found = []
    for user_rate in user_rates:
        rates = {name: rate_between(front, user_rate) for name, front in fronts.items()}
        samples = {name: _rates_between(draws[name], user_rate) for name, rate in rates.items() if rate is not None}
        found.append(AtSpeed(user_rate, rates, speedups(workload.reference, rates, samples)))
    return tuple(found)


def _resampled_fronts(workload: Workload, series: MethodSeries, seed: int) -> list[Front]:
    """The frontier of each resample of every point's requests."""
    gpus = workload.gpus_of(series)
    points = [point for point in series.points if point.user_rate is not None and point.rows]
    draws = [point_rates(p, seed, f"{series.name}/{p.category}/{p.concurrency}") for p in points]
    fronts: list[Front] = []
    for index in range(NUM_SAMPLES):
        sample = [SpeedPoint(float(users[index]), float(rates[index]) / gpus, 0) for users, rates in draws]
        fronts.append(frontier(point for point in sample if math.isfinite(point.user_rate)))
    return fronts


def _rates_between(fronts: Sequence[Front], user_rate: float) -> Samples:
    """Throughput of each resample at that speed; NaN where its curve does not reach it."""
    rates = [rate_between(front, user_rate) for front in fronts]
    return np.array([np.nan if rate is None else rate for rate in rates])
