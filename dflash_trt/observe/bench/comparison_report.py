# SPDX-License-Identifier: Apache-2.0
"""All that `dflash-trt bench report` says, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.comparison_tables import (
    Average,
    ComparisonRow,
    average,
    category_rows,
    data_set_row,
    matched_concurrencies,
    sweep,
)
from dflash_trt.observe.bench.records import BenchRun, RecordedAcceptance
from dflash_trt.observe.bench.speed_curve import AtSpeed, SpeedCurve, at_speeds, curve, ends, gpus_of, num_gpus, speeds
from dflash_trt.observe.bench.workloads import BASELINE, LoadedRun, MethodSeries, Workload, workloads

INVERSION = 1.1
"""Times faster at a higher concurrency: more is no chance."""


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
    """Of methods."""
    per: str
    """"GPU", or "server" where not every run tells its GPUs."""
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
    """Of the intervals."""
    notes: tuple[str, ...]
    workloads: tuple[WorkloadReport, ...]
    tasks: tuple[TaskReport, ...]
    methods: tuple[str, ...]
    titles: dict[str, str]


def report(
    runs: Sequence[LoadedRun], seed: int, user_rates: Sequence[float] = (), concurrency: int | None = None
) -> BenchReport:
    """`user_rates` are those at which throughput is compared, round ones unless given; `concurrency`: of categories."""
    measured = workloads(runs)
    series = {each.name: each for work in measured for each in work.series}
    return BenchReport(
        runs=tuple(RunFacts(loaded.directory.name, loaded.run) for loaded in runs),
        seed=seed,
        notes=notes(runs, measured),
        workloads=tuple(_workload_report(w, seed, user_rates) for w in measured if _has_curve(w, measured)),
        tasks=tuple(_tasks(measured, seed, concurrency)),
        methods=tuple(series),
        titles={name: each.title for name, each in series.items()},
    )


def _has_curve(work: Workload, measured: Sequence[Workload]) -> bool:
    """A category has a picture of its own where it was measured at several concurrencies, or nothing else was."""
    is_swept = any(len(series.points) > 1 for series in work.series)
    return work.category is None or is_swept or len(measured) == 1


def _workload_report(work: Workload, seed: int, user_rates: Sequence[float]) -> WorkloadReport:
    curves = tuple(curve(series, gpus_of(series, work)) for series in work.series)
    per = "server" if num_gpus(work) is None else "GPU"
    return WorkloadReport(
        title=work.title,
        titles={series.name: series.title for series in work.series},
        per=per,
        curves=curves,
        ends=tuple(ends(each, per) for each in curves),
        at_speeds=at_speeds(work, user_rates or speeds(curves), seed),
        sweep=sweep(work, seed),
        acceptance=tuple(shares for series in work.series for shares in _shares(series)),
    )


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
            yield TaskReport(title=f"{name}, by category", rows=rows, average=average(rows, methods))
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
        yield f"{work.title}: no method named {BASELINE!r}, so there are no speed-ups"
    for field in ("request", "server", "num_gpus", "client"):
        values = {msgspec.json.encode(getattr(series.run, field)) for series in work.series}
        if len(values) > 1:
            yield f"{work.title}: the runs differ in {field}: {', '.join(sorted(value.decode() for value in values))}"
    if num_gpus(work) is None and any(series.run.num_gpus for series in work.series):
        yield f"{work.title}: not every run tells its GPUs, so throughput is per server"
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
