# SPDX-License-Identifier: Apache-2.0
"""Methods at equal concurrency, on all prompts and by task, and their throughput over the reference's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.observe.bench.point_record import RequestRow
from dflash_trt.observe.bench.report.intervals import Speedup, point_rates, request_rate, request_rates, speedups
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


class Average(msgspec.Struct, frozen=True):
    """The mean of the rows' speed-ups and taus, over the rows that every method has."""

    num_rows: int
    speedups: dict[str, float]
    taus_of_drafting_passes: dict[str, float]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """Categories of one prompt set, or data sets."""

    title: str
    rows: tuple[ComparisonRow, ...]
    average: Average | None
    """Over categories."""


def tasks(measured: Sequence[Workload], seed: int, concurrency: int | None) -> Iterator[TaskReport]:
    """Categories of each prompt set, then the sets; at `concurrency`, or the lowest that all methods have."""
    for name in dict.fromkeys(work.prompt_set for work in measured):
        of_set = [work for work in measured if work.prompt_set == name]
        whole = next((work for work in of_set if work.category is None), None)
        categories = [work for work in of_set if work.category is not None]
        matched = set.intersection(*(set(matched_concurrencies(work)) for work in categories or of_set))
        chosen = min(matched, default=None) if concurrency is None else concurrency
        if chosen is not None and (rows := category_rows(whole, categories, chosen, seed)):
            methods = tuple(dict.fromkeys(series.name for work in of_set for series in work.series))
            mean = average(rows, methods, of_set[0].reference)
            yield TaskReport(title=f"{name}, by category", rows=rows, average=mean)
    sets = tuple(row for work in measured if work.category is None and (row := data_set_row(work, seed)))
    if sets:
        yield TaskReport(title="Data sets", rows=sets, average=None)


def matched_concurrencies(workload: Workload) -> tuple[int, ...]:
    """Concurrencies at which every method of the workload has a point."""
    sets = [{point.concurrency for point in series.points if point.rows} for series in workload.series]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def category_rows(
    whole: Workload | None, categories: Sequence[Workload], concurrency: int, seed: int
) -> tuple[ComparisonRow, ...]:
    """A row per category: from points of its own, or else from its requests among the points on all prompts."""
    rows = [_row(work.category or "", work, concurrency, seed) for work in categories]
    if not categories and whole is not None:
        requests = [row for series in whole.series for point in series.points for row in point.rows]
        names = {row.category for row in requests if row.category is not None}
        rows = [_row(name, whole, concurrency, seed, category=name) for name in sorted(names)]
    return tuple(row for row in rows if row.by_method)


def data_set_row(workload: Workload, seed: int) -> ComparisonRow | None:
    """At the lowest concurrency that every method has; None where they share none."""
    matched = matched_concurrencies(workload)
    return _row(workload.title, workload, matched[0], seed) if matched else None


def _row(name: str, workload: Workload, concurrency: int, seed: int, category: str | None = None) -> ComparisonRow:
    """Figures of all requests at that concurrency, or of one category's."""
    requests: dict[str, tuple[RequestRow, ...]] = {}
    taus: dict[str, float | None] = {}
    for series in workload.series:
        if (point := series.at(concurrency)) is not None:
            rows = tuple(row for row in point.rows if category in (None, row.category))
            whole = point.acceptance.tau_of_drafting_passes
            requests |= {series.name: rows} if rows else {}
            taus[series.name] = whole if category is None else _tau_of_drafting_passes(rows)
    rates = {method: request_rate(rows) for method, rows in requests.items()}
    samples = {method: request_rates(rows, seed, f"{method}/{name}") for method, rows in requests.items()}
    limits = taus if workload.reference == BASELINE else None
    found = speedups(workload.reference, rates, samples, limits)
    by_method = {method: MethodFigures(rate, found.get(method), taus[method]) for method, rate in rates.items()}
    return ComparisonRow(name, concurrency, by_method)


def _tau_of_drafting_passes(rows: Sequence[RequestRow]) -> float | None:
    """Tau over the requests, if each has its own counts."""
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    return sum(counts, Acceptance()).tau_of_drafting_passes if len(counts) == len(rows) else None


def average(rows: Sequence[ComparisonRow], methods: Sequence[str], reference: str = BASELINE) -> Average | None:
    """Over the rows in which every method has a speed-up; None where there are fewer than two."""
    compared = [method for method in methods if method != reference]
    found = [
        (
            row,
            {
                name: each.speedup.value
                for name, each in row.by_method.items()
                if each.speedup and each.speedup.is_possible
            },
        )
        for row in rows
    ]
    whole = [(row, values) for row, values in found if all(name in values for name in compared)]
    if len(whole) < 2:
        return None
    taus = {}
    for method in methods:
        known = [row.by_method[method].tau_of_drafting_passes for row, _ in whole if method in row.by_method]
        values = [tau for tau in known if tau is not None]
        if len(values) == len(whole):
            taus[method] = statistics.fmean(values)
    means = {method: statistics.fmean(values[method] for _, values in whole) for method in compared}
    return Average(len(whole), means, taus)
