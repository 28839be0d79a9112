# SPDX-License-Identifier: Apache-2.0
"""The values of `dflash-trt bench report`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.observe.bench.report.beside import BesideRow, beside
from dflash_trt.observe.bench.report.equal_concurrency import ComparisonRow, TaskReport, sweep, tasks
from dflash_trt.observe.bench.report.published_rows import PublishedSet
from dflash_trt.observe.bench.report.report_notes import notes
from dflash_trt.observe.bench.report.speed_curve import AtSpeed, SpeedCurve, at_speeds, curve, speeds
from dflash_trt.observe.bench.report.workloads import BASELINE, LoadedRun, Workload, workloads


class WorkloadReport(msgspec.Struct, frozen=True):
    """The curve of a set of prompts, or of one category."""

    workload: Workload
    curves: tuple[SpeedCurve, ...]
    at_speeds: tuple[AtSpeed, ...]
    sweep: tuple[ComparisonRow, ...]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    runs: tuple[LoadedRun, ...]
    seed: int
    """Seed of the resampled intervals."""
    notes: tuple[str, ...]
    workloads: tuple[WorkloadReport, ...]
    tasks: tuple[TaskReport, ...]
    titles: dict[str, str]
    """Display titles by method."""
    reference: str
    published: PublishedSet | None = None
    """Published rows that the run is put beside."""
    beside: tuple[BesideRow, ...] = ()


def report(
    runs: Sequence[LoadedRun], seed: int, user_rates: Sequence[float] = (), concurrency: int | None = None, *,
    reference: str = BASELINE, published: PublishedSet | None = None,
) -> BenchReport:  # fmt: skip
    """Compares the methods of `runs` with `reference`; raises ConfigError where no run has it.

    Throughput is compared at `user_rates`, by default round speeds, and categories at `concurrency`; the run is put
    beside the `published` rows.
    """
    measured = workloads(runs, reference)
    return BenchReport(
        runs=tuple(runs),
        seed=seed,
        notes=notes(runs, measured),
        workloads=tuple(_workload_report(work, seed, user_rates) for work in measured if _has_curve(work, measured)),
        tasks=tuple(tasks(measured, seed, concurrency)),
        titles={series.name: series.title for work in measured for series in work.series},
        reference=reference,
        published=published,
        beside=()
        if published is None
        else beside(
            [(work, {row.concurrency: row.by_method for row in sweep(work, seed)}) for work in measured], published
        ),
    )


def _has_curve(work: Workload, measured: Sequence[Workload]) -> bool:
    """Whether to draw it: a category only if it has several concurrencies, or if nothing else was measured."""
    is_swept = any(len(series.points) > 1 for series in work.series)
    return work.category is None or is_swept or len(measured) == 1


def _workload_report(work: Workload, seed: int, user_rates: Sequence[float]) -> WorkloadReport:
    curves = tuple(curve(work, series) for series in work.series)
    return WorkloadReport(work, curves, at_speeds(work, user_rates or speeds(curves), seed), sweep(work, seed))


def document(report: BenchReport) -> dict[str, object]:
    """The report as JSON; points are there without their requests."""
    return {
        "runs": [{"directory": each.directory.name, "run": msgspec.to_builtins(each.run)} for each in report.runs],
        "seed": report.seed, "notes": report.notes, "reference": report.reference, "titles": report.titles,
        "workloads": [_workload_document(work) for work in report.workloads],
        "tasks": msgspec.to_builtins(report.tasks), "beside": msgspec.to_builtins(report.beside),
    }  # fmt: skip


def _workload_document(report: WorkloadReport) -> dict[str, object]:
    work = report.workload
    points = [
        {"name": series.name} | msgspec.to_builtins(msgspec.structs.replace(point, rows=()))
        for series in work.series for point in series.points
    ]  # fmt: skip
    parts = {name: msgspec.to_builtins(getattr(report, name)) for name in ("curves", "at_speeds", "sweep")}
    return {"title": work.title, "per": work.per, **parts, "points": points}
