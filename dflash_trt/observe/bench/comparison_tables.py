# SPDX-License-Identifier: Apache-2.0
"""Methods at equal concurrency: the sweep, and tasks (a data set, or a category of one) as published tables have it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.observe.bench.bootstrap import interval, point_rates, request_rate, request_rates
from dflash_trt.observe.bench.records import RequestRow
from dflash_trt.observe.bench.speed_curve import MeasuredSpeedup, gpus_of
from dflash_trt.observe.bench.workloads import BASELINE, MethodSeries, Workload


class MethodFigures(msgspec.Struct, frozen=True):
    """One method in one row of a table."""

    rate: float | None
    """Tokens a second: of all users in a sweep, of one request in tasks."""
    speedup: MeasuredSpeedup | None
    """Over plain decoding; None for itself."""
    tau_of_drafting_passes: float | None = None
    user_rate: float | None = None
    lost: int | None = None
    """Requests that failed or timed out."""


class ComparisonRow(msgspec.Struct, frozen=True):
    """A row of a table: a concurrency, a category or a data set."""

    name: str
    concurrency: int
    by_method: dict[str, MethodFigures]


class Average(msgspec.Struct, frozen=True):
    """The mean of the rows' speed-ups and taus, over the rows that every method has."""

    num_rows: int
    speedups: dict[str, float]
    taus_of_drafting_passes: dict[str, float]


def sweep(workload: Workload, seed: int) -> tuple[ComparisonRow, ...]:
    """Every concurrency that some method was measured at; speed-ups of throughput where plain decoding was, too."""
    rows = []
    for concurrency in sorted({p.concurrency for series in workload.series for p in series.points}):
        by_method = {}
        for series in workload.series:
            point = series.at(concurrency)
            if point is not None:
                user = point.user_tokens_per_second
                by_method[series.name] = MethodFigures(
                    point.output_tokens_per_second / gpus_of(series, workload),
                    _sweep_speedup(workload, series, concurrency, seed), point.acceptance.tau_of_drafting_passes,
                    user.p50 if user else None, point.requests.failed + point.requests.timed_out,
                )  # fmt: skip
        if by_method:
            rows.append(ComparisonRow(str(concurrency), concurrency, by_method))
    return tuple(rows)


def _sweep_speedup(workload: Workload, series: MethodSeries, concurrency: int, seed: int) -> MeasuredSpeedup | None:
    if series.name == BASELINE:
        return None
    baseline, point = workload.baseline(), series.at(concurrency)
    plain = baseline.at(concurrency) if baseline else None
    if baseline is None or plain is None or point is None:
        return MeasuredSpeedup(None, why=f"plain decoding was not measured at concurrency {concurrency}")
    pairs = ((point, series), (plain, baseline))
    rates = [p.output_tokens_per_second / gpus_of(of, workload) for p, of in pairs]
    if not rates[1]:
        return MeasuredSpeedup(None, why="plain decoding brought no token")
    samples = [
        point_rates(p, seed, f"{of.name}/{p.category}/{concurrency}")[1] / gpus_of(of, workload) for p, of in pairs
    ]
    return MeasuredSpeedup(rates[0] / rates[1], interval(samples[0] / samples[1]))


def matched_concurrencies(workload: Workload) -> tuple[int, ...]:
    """Those at which every method of the workload has a point."""
    sets = [{p.concurrency for p in series.points if p.requests.completed} for series in workload.series]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def category_rows(
    whole: Workload | None, categories: Sequence[Workload], concurrency: int, seed: int
) -> tuple[ComparisonRow, ...]:
    """A row per category: from points of its own, or else from the requests of it among those on all prompts."""
    rows = [_task_row(work.category or "", work.series, concurrency, seed) for work in categories]
    if not categories and whole is not None:
        points = [point for series in whole.series for point in series.points]
        names = {row.category for point in points for row in point.rows if row.category is not None}
        rows = [_task_row(name, whole.series, concurrency, seed, category=name) for name in sorted(names)]
    return tuple(row for row in rows if row.by_method)


def data_set_row(workload: Workload, seed: int) -> ComparisonRow | None:
    """At the lowest concurrency that every method has; None where they share none."""
    matched = matched_concurrencies(workload)
    return _task_row(workload.title, workload.series, matched[0], seed) if matched else None


def _task_row(
    name: str, series: Iterable[MethodSeries], concurrency: int, seed: int, category: str | None = None
) -> ComparisonRow:
    """With `category`, of its requests only."""
    requests: dict[str, tuple[tuple[RequestRow, ...], float | None]] = {}
    for method in series:
        point = method.at(concurrency)
        rows = () if point is None else tuple(row for row in point.rows if category in (None, row.category))
        if point is not None and rows:
            whole = point.acceptance.tau_of_drafting_passes
            requests[method.name] = rows, whole if category is None else _tau_of_drafting_passes(rows)
    by_method = {}
    for method_name, (rows, tau) in requests.items():
        speedup = None
        if method_name != BASELINE:
            speedup = _speedup(name, method_name, rows, requests.get(BASELINE, ((), None))[0], seed)
        by_method[method_name] = MethodFigures(request_rate(rows), speedup, tau)
    return ComparisonRow(name, concurrency, by_method)


def _tau_of_drafting_passes(rows: Sequence[RequestRow]) -> float | None:
    """Over requests, where each tells its own counts."""
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    return sum(counts, Acceptance()).tau_of_drafting_passes if len(counts) == len(rows) else None


def _speedup(
    name: str, method: str, rows: Sequence[RequestRow], plain: Sequence[RequestRow], seed: int
) -> MeasuredSpeedup:
    rate, plain_rate = request_rate(rows), request_rate(plain)
    if not plain_rate or rate is None:
        return MeasuredSpeedup(None, why="plain decoding was not measured on it")
    samples = request_rates(rows, seed, f"{method}/{name}") / request_rates(plain, seed, f"none/{name}")
    return MeasuredSpeedup(rate / plain_rate, interval(samples))


def average(rows: Sequence[ComparisonRow], methods: Sequence[str]) -> Average | None:
    """Over the rows in which every method has a speed-up; None where there is no such row, or a single one."""
    compared = [method for method in methods if method != BASELINE]
    whole = [row for row in rows if all(_factor(row, method) is not None for method in compared)]
    if len(whole) < 2:
        return None
    speedups = {method: statistics.fmean(_factor(row, method) or 0.0 for row in whole) for method in compared}
    taus = {}
    for method in methods:
        values = [row.by_method[method].tau_of_drafting_passes for row in whole if method in row.by_method]
        reported = [tau for tau in values if tau is not None]
        if len(reported) == len(whole):
            taus[method] = statistics.fmean(reported)
    return Average(len(whole), speedups, taus)


def _factor(row: ComparisonRow, method: str) -> float | None:
    measured = row.by_method.get(method)
    return measured.speedup.value if measured is not None and measured.speedup is not None else None
