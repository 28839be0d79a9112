# SPDX-License-Identifier: Apache-2.0
"""The curve of a method: throughput against the speed of one user, over concurrency."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dflash_trt.observe.bench.report.workloads import MethodSeries, Workload
from dflash_trt.observe.plots.frontier import frontier

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
