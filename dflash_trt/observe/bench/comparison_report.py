# SPDX-License-Identifier: Apache-2.0
"""The values of `dflash-trt bench report`: methods at equal concurrency and at equal speed, by workload and task."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.observe.bench.goodput import Goodput, Objectives, goodput, latencies
from dflash_trt.observe.bench.records import BenchRun, Distribution, RecordedAcceptance, RequestRow
from dflash_trt.observe.bench.run_directory import BASELINE, LoadedRun, MethodSeries, Workload, workloads
from dflash_trt.observe.bench.speed_curve import (
    AtSpeed,
    MeasuredSpeedup,
    SpeedCurve,
    at_speeds,
    curve,
    ends,
    gpus_of,
    interval,
    num_gpus,
    point_rates,
    request_rate,
    request_rates,
    speeds,
)

INVERSION = 1.1
"""Factor above which a higher speed at a higher concurrency is not chance."""


class MethodFigures(msgspec.Struct, frozen=True):
    """One method in one row of a table."""

    rate: float | None
    """Tokens a second: of all users in a sweep, of one request in tasks."""
    speedup: MeasuredSpeedup | None
    """Over the reference; None for itself."""
    tau_of_drafting_passes: float | None = None
    user_rate: float | None = None
    lost: int | None = None
    """Requests that failed or timed out."""
    goodput: Goodput | None = None
    """Where objectives are given."""
    latencies: tuple[tuple[str, Distribution], ...] = ()
    """In seconds, by title."""


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


def sweep(workload: Workload, seed: int, objectives: Objectives | None = None) -> tuple[ComparisonRow, ...]:
    """Every concurrency that some method was measured at; speed-ups of throughput where the reference was, too."""
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
                    goodput(point, objectives) if objectives else None, tuple(latencies(point)),
                )  # fmt: skip
        if by_method:
            rows.append(ComparisonRow(str(concurrency), concurrency, by_method))
    return tuple(rows)


def _sweep_speedup(workload: Workload, series: MethodSeries, concurrency: int, seed: int) -> MeasuredSpeedup | None:
    if series.name == workload.reference:
        return None
    baseline, point = workload.baseline(), series.at(concurrency)
    plain = baseline.at(concurrency) if baseline else None
    if baseline is None or plain is None or point is None:
        return MeasuredSpeedup(None, why=f"{workload.reference_title} was not measured at concurrency {concurrency}")
    pairs = ((point, series), (plain, baseline))
    rates = [p.output_tokens_per_second / gpus_of(of, workload) for p, of in pairs]
    if not rates[1]:
        return MeasuredSpeedup(None, why=f"{workload.reference_title} brought no token")
    samples = [
        point_rates(p, seed, f"{of.name}/{p.category}/{concurrency}")[1] / gpus_of(of, workload) for p, of in pairs
    ]
    return MeasuredSpeedup(rates[0] / rates[1], interval(samples[0] / samples[1]))


def matched_concurrencies(workload: Workload) -> tuple[int, ...]:
    """Concurrencies at which every method of the workload has a point."""
    sets = [{p.concurrency for p in series.points if p.requests.completed} for series in workload.series]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def category_rows(
    whole: Workload | None, categories: Sequence[Workload], concurrency: int, seed: int
) -> tuple[ComparisonRow, ...]:
    """A row per category: from points of its own, or else from the requests of it among those on all prompts."""
    rows = [_task_row(work.category or "", work, concurrency, seed) for work in categories]
    if not categories and whole is not None:
        points = [point for series in whole.series for point in series.points]
        names = {row.category for point in points for row in point.rows if row.category is not None}
        rows = [_task_row(name, whole, concurrency, seed, category=name) for name in sorted(names)]
    return tuple(row for row in rows if row.by_method)


def data_set_row(workload: Workload, seed: int) -> ComparisonRow | None:
    """At the lowest concurrency that every method has; None where they share none."""
    matched = matched_concurrencies(workload)
    return _task_row(workload.title, workload, matched[0], seed) if matched else None


def _task_row(name: str, workload: Workload, concurrency: int, seed: int, category: str | None = None) -> ComparisonRow:
    """With `category`, of its requests only."""
    requests: dict[str, tuple[tuple[RequestRow, ...], float | None]] = {}
    for method in workload.series:
        point = method.at(concurrency)
        rows = () if point is None else tuple(row for row in point.rows if category in (None, row.category))
        if point is not None and rows:
            whole = point.acceptance.tau_of_drafting_passes
            requests[method.name] = rows, whole if category is None else _tau_of_drafting_passes(rows)
    by_method = {}
    for method_name, (rows, tau) in requests.items():
        speedup = None
        if method_name != workload.reference:
            speedup = _speedup(name, method_name, rows, requests.get(workload.reference, ((), None))[0], workload, seed)
        by_method[method_name] = MethodFigures(request_rate(rows), speedup, tau)
    return ComparisonRow(name, concurrency, by_method)


def _tau_of_drafting_passes(rows: Sequence[RequestRow]) -> float | None:
    """Tau over requests, if each has its own counts."""
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    return sum(counts, Acceptance()).tau_of_drafting_passes if len(counts) == len(rows) else None


def _speedup(
    name: str, method: str, rows: Sequence[RequestRow], plain: Sequence[RequestRow], workload: Workload, seed: int
) -> MeasuredSpeedup:
    rate, plain_rate = request_rate(rows), request_rate(plain)
    if not plain_rate or rate is None:
        return MeasuredSpeedup(None, why=f"{workload.reference_title} was not measured on it")
    samples = request_rates(rows, seed, f"{method}/{name}")
    samples = samples / request_rates(plain, seed, f"{workload.reference}/{name}")
    return MeasuredSpeedup(rate / plain_rate, interval(samples))


def average(rows: Sequence[ComparisonRow], methods: Sequence[str], reference: str = BASELINE) -> Average | None:
    """Over the rows in which every method has a speed-up; None where there is no such row, or a single one."""
    compared = [method for method in methods if method != reference]
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


class PositionShares(msgspec.Struct, frozen=True):
    """Acceptance of one method at one point, by position of the draft."""

    method: str
    concurrency: int
    acceptance: RecordedAcceptance
    shares: tuple[float, ...]
    """Accepted drafts at position 1, 2, ... per drafting pass."""


class WorkloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of a set of prompts, or of one category."""

    title: str
    titles: dict[str, str]
    """Display titles by method."""
    reference: str
    reference_title: str
    """In sentences."""
    per: str
    """"GPU", or "server" where not every run states its GPUs."""
    curves: tuple[SpeedCurve, ...]
    ends: tuple[str, ...]
    at_speeds: tuple[AtSpeed, ...]
    sweep: tuple[ComparisonRow, ...]
    acceptance: tuple[PositionShares, ...]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens/s of one request, by category of one set of prompts, or by data set."""

    title: str
    rows: tuple[ComparisonRow, ...]
    average: Average | None
    """Over categories."""


class RunFacts(msgspec.Struct, frozen=True):
    directory: str
    run: BenchRun


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    runs: tuple[RunFacts, ...]
    seed: int
    """Seed of the resampled intervals."""
    notes: tuple[str, ...]
    workloads: tuple[WorkloadReport, ...]
    tasks: tuple[TaskReport, ...]
    methods: tuple[str, ...]
    titles: dict[str, str]
    reference: str
    objectives: dict[str, float]


def report(
    runs: Sequence[LoadedRun], seed: int, user_rates: Sequence[float] = (), concurrency: int | None = None, *,
    reference: str = BASELINE, objectives: Objectives | None = None,
) -> BenchReport:  # fmt: skip
    """`user_rates` are those at which throughput is compared, round ones unless given; `concurrency`: of categories.

    `reference` is the method that the others are compared with. Raises ConfigError where no run has it.
    """
    measured = workloads(runs, reference)
    series = {each.name: each for work in measured for each in work.series}
    return BenchReport(
        runs=tuple(RunFacts(loaded.directory.name, loaded.run) for loaded in runs),
        seed=seed,
        notes=notes(runs, measured),
        workloads=tuple(_workload_report(w, seed, user_rates, objectives) for w in measured if _has_curve(w, measured)),
        tasks=tuple(_tasks(measured, seed, concurrency)),
        methods=tuple(series),
        titles={name: each.title for name, each in series.items()},
        reference=reference,
        objectives=dict(objectives or {}),
    )


def _has_curve(work: Workload, measured: Sequence[Workload]) -> bool:
    """A category has a picture of its own where it was measured at several concurrencies, or nothing else was."""
    is_swept = any(len(series.points) > 1 for series in work.series)
    return work.category is None or is_swept or len(measured) == 1


def _workload_report(
    work: Workload, seed: int, user_rates: Sequence[float], objectives: Objectives | None
) -> WorkloadReport:
    curves = tuple(curve(series, gpus_of(series, work)) for series in work.series)
    per = "server" if num_gpus(work) is None else "GPU"
    return WorkloadReport(
        title=work.title, titles={series.name: series.title for series in work.series},
        reference=work.reference, reference_title=work.reference_title, per=per, curves=curves,
        ends=tuple(ends(each, per) for each in curves),
        at_speeds=at_speeds(work, user_rates or speeds(curves), seed), sweep=sweep(work, seed, objectives),
        acceptance=tuple(shares for series in work.series for shares in _shares(series)),
    )  # fmt: skip


def _shares(series: MethodSeries) -> Iterator[PositionShares]:
    for point in series.points:
        acceptance, counts = point.acceptance, point.acceptance.counts
        if counts is not None and counts.proposed:
            shares = tuple(count / counts.drafting_passes for count in counts.accepted_by_position)
            yield PositionShares(series.name, point.concurrency, acceptance, shares)
        elif counts is None and acceptance.source != "not published":
            yield PositionShares(series.name, point.concurrency, acceptance, ())


def _tasks(measured: Sequence[Workload], seed: int, concurrency: int | None) -> Iterator[TaskReport]:
    """Categories of each set of prompts, then the sets; `concurrency` is the lowest that all have unless given."""
    for name in dict.fromkeys(work.prompt_set for work in measured):
        of_set = [work for work in measured if work.prompt_set == name]
        whole = next((work for work in of_set if work.category is None), None)
        categories = [work for work in of_set if work.category is not None]
        matched = sorted(set.intersection(*(set(matched_concurrencies(work)) for work in categories or of_set)))
        chosen = concurrency if concurrency is not None else matched[0] if matched else None
        rows = () if chosen is None else category_rows(whole, categories, chosen, seed)
        if rows:
            methods = tuple(dict.fromkeys(series.name for work in of_set for series in work.series))
            yield TaskReport(
                title=f"{name}, by category", rows=rows, average=average(rows, methods, of_set[0].reference)
            )
    rows = tuple(row for work in measured if work.category is None and (row := data_set_row(work, seed)))
    if rows:
        yield TaskReport(title="Data sets", rows=rows, average=None)


def notes(runs: Sequence[LoadedRun], measured: Sequence[Workload]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_losses(runs), *(note for work in measured for note in _workload_notes(work))]))


def _losses(runs: Sequence[LoadedRun]) -> Iterator[str]:
    for loaded in runs:
        yield from (f"{loaded.directory.name}: {warning}" for warning in loaded.run.warnings)
        for point in loaded.points:
            if lost := point.requests.failed + point.requests.timed_out:
                causes = "; ".join(f"{text} ({count})" for text, count in point.requests.errors.items())
                yield (
                    f"{loaded.directory.name}: {point.name}: {lost} of {point.requests.sent} requests failed or timed"
                    f" out and are in no rate: {causes}"
                )


def _workload_notes(work: Workload) -> Iterator[str]:
    if work.baseline() is None:
        yield f"{work.title}: no method named {work.reference!r}, so there are no speed-ups; --reference names another"
    for field in ("request", "arrivals", "server", "num_gpus", "client"):
        values = {msgspec.json.encode(getattr(series.run, field)) for series in work.series}
        if len(values) > 1:
            yield f"{work.title}: the runs differ in {field}: {', '.join(sorted(value.decode() for value in values))}"
    if num_gpus(work) is None and any(series.run.num_gpus for series in work.series):
        yield f"{work.title}: not every run states its GPUs, so throughput is per server"
    for series in work.series:
        points = curve(series, 1).points
        slow = [
            str(p.concurrency)
            for p in points
            if any(q.concurrency > p.concurrency and q.user_rate > INVERSION * p.user_rate for q in points)
        ]
        if slow:
            yield (
                f"{work.title}: {series.title} at concurrency {', '.join(slow)}: users were slower than at a higher"
                " one; the machine had other work, or the run is too short"
            )
