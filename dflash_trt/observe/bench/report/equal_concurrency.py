# SPDX-License-Identifier: Apache-2.0
"""Every method at each concurrency, and its throughput over the reference's there."""

from __future__ import annotations

import msgspec

from dflash_trt.observe.bench.report.intervals import Speedup, point_rates, speedups
from dflash_trt.observe.bench.report.workloads import BASELINE, Workload


class MethodFigures(msgspec.Struct, frozen=True):
    """One method in one row of a table."""

    rate: float | None
    """Tokens a second: of all users in a sweep, of one request in tasks."""
    speedup: Speedup | None
    """Over the reference; None for itself, and where one of the two was not measured."""
    tau_of_drafting_passes: float | None = None
    user_rate: float | None = None
    lost: int = 0
    """Requests that failed or timed out."""


class ComparisonRow(msgspec.Struct, frozen=True):
    """A row of a table: a concurrency, a category or a data set."""

    name: str
    concurrency: int
    by_method: dict[str, MethodFigures]


def sweep(workload: Workload, seed: int) -> tuple[ComparisonRow, ...]:
    """A row for every concurrency at which some method completed a request."""
    concurrencies = sorted({point.concurrency for series in workload.series for point in series.points if point.rows})
    return tuple(ComparisonRow(str(c), c, _figures(workload, c, seed)) for c in concurrencies)


def _figures(workload: Workload, concurrency: int, seed: int) -> dict[str, MethodFigures]:
    found = [(series, point) for series in workload.series if (point := series.at(concurrency)) is not None]
    rates = {series.name: workload.gpu_rate(series, point) for series, point in found}
    samples = {
        series.name: point_rates(point, seed, f"{series.name}/{point.category}/{concurrency}")[1]
        / workload.gpus_of(series)
        for series, point in found
    }
    taus = {series.name: point.acceptance.tau_of_drafting_passes for series, point in found}
    ratios = speedups(workload.reference, rates, samples, taus if workload.reference == BASELINE else None)
    return {
        series.name: MethodFigures(
            rates[series.name], ratios.get(series.name), taus[series.name], point.user_rate,
            point.lost,
        )
        for series, point in found
    }  # fmt: skip
