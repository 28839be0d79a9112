# SPDX-License-Identifier: Apache-2.0
"""Throughput of each method where every user gets the same speed, and its ratio to the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from dflash_trt.observe.bench.report.intervals import NUM_SAMPLES, Samples, Speedup, point_rates, speedups
from dflash_trt.observe.bench.report.speed_curve import SpeedPoint, curve
from dflash_trt.observe.bench.report.workloads import MethodSeries, Workload
from dflash_trt.observe.plots.frontier import frontier, rate_between

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
