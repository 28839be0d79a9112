# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of a report."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.observe.bench.point_record import BenchPoint, Latency
from dflash_trt.observe.bench.report.bench_report import BenchReport, WorkloadReport
from dflash_trt.observe.bench.report.equal_concurrency import ComparisonRow, TaskReport
from dflash_trt.observe.bench.report.run_tables import NONE, TAU, factor_text, rate_text, tau_text
from dflash_trt.observe.bench.report.speed_curve import AtSpeed, SpeedCurve
from dflash_trt.observe.bench.report.workloads import MethodSeries, Workload
from dflash_trt.observe.pages.page_templates import Table
from dflash_trt.observe.plots.curves import Plot, PlotCurve, PlotPoint
from dflash_trt.observe.plots.method_styles import styles, title_of

LATENCY_TITLES: dict[Latency, str] = {
    "time_to_first_token": "Time to first token",
    "inter_token_latency": "Inter-token latency, per token",
    "request_latency": "Request latency",
}


def drafts_table(work: Workload) -> Table | None:
    """Counts of drafts, with their source where there are several; None without counts."""
    found = [
        (series.title, point) for series in work.series for point in series.points
        if point.acceptance.tau_of_drafting_passes is not None
    ]  # fmt: skip
    sources = list(dict.fromkeys(point.acceptance.source for _, point in found))
    is_mixed = len(sources) > 1
    rows = []
    for title, point in found:
        counts = point.acceptance.counts
        numbers = (None,) * 3 if counts is None else (counts.drafting_passes, counts.proposed, counts.accepted)
        rows.append(
            (title, *((point.acceptance.source,) if is_mixed else ()), str(point.concurrency),
             *(NONE if number is None else f"{number:,}" for number in numbers),
             tau_text(point.acceptance.tau_of_drafting_passes))
        )  # fmt: skip
    if not rows:
        return None
    return Table(
        title=f"Drafts{'' if is_mixed else f' ({sources[0]})'}: {work.title}", rows=tuple(rows),
        columns=("method", *(("source",) if is_mixed else ()), "concurrency", "drafting passes", "proposed", "accepted",
                 TAU), num_text_columns=1 + is_mixed,
    )  # fmt: skip


def position_tables(work: Workload) -> Iterator[Table]:
    """Share of drafting passes that accepted the draft at position 1, 2, ...: a table for each method."""
    for series in work.series:
        counted = [
            (point.concurrency, counts) for point in series.points
            if (counts := point.acceptance.counts) is not None and counts.drafting_passes
        ]  # fmt: skip
        most = max((len(counts.accepted_by_position) for _, counts in counted), default=0)
        shares = [
            [f"{accepted / counts.drafting_passes:.0%}" for accepted in counts.accepted_by_position]
            + [NONE] * (most - len(counts.accepted_by_position))
            for _, counts in counted
        ]
        if most:
            yield Table(
                title=f"Acceptance by position, {series.title}: {work.title}", num_text_columns=0,
                columns=("position", *(f"at {concurrency}" for concurrency, _ in counted)),
                rows=tuple((str(position), *cells) for position, cells in enumerate(zip(*shares, strict=True), 1)),
            )  # fmt: skip


def title(report: BenchReport) -> str:
    models = dict.fromkeys(method.model for facts in report.runs for method in facts.run.methods)
    servers = dict.fromkeys(facts.run.server or "hardware not stated" for facts in report.runs)
    return f"{', '.join(models)} on {', '.join(servers)}: measured"


def workload_plot(report: BenchReport, work: WorkloadReport) -> Plot:
    style_of = dict(zip(report.titles, styles(tuple(report.titles)), strict=True))
    curves = [
        PlotCurve(curve.title, style_of[curve.name], tuple(
            PlotPoint(user_rate=p.user_rate, gpu_rate=p.gpu_rate, label=str(p.concurrency), is_best=p in curve.front)
            for p in curve.points
        ))
        for curve in work.curves if curve.points
    ]  # fmt: skip
    workload = work.workload
    return Plot(
        title=workload.title, detail=title(report), per=workload.per, labels="concurrency", curves=tuple(curves)
    )


def speed_table(work: WorkloadReport) -> Table:
    """Throughput where each user gets a speed, between measured points."""
    workload = work.workload
    compared = [series.name for series in workload.compared()]
    rows = [
        (f"{at.user_rate:,g}", *(_reached(curve, at) for curve in work.curves),
         *(factor_text(at.factors.get(name)) for name in compared))
        for at in work.at_speeds
    ]  # fmt: skip
    factors = [f"{title_of(name)} / {title_of(workload.reference)}" for name in compared]
    return Table(
        title=f"Tokens/s per {workload.per} at equal speed of a user: {workload.title}",
        columns=("tokens/s/user", *(curve.title for curve in work.curves), *factors),
        rows=tuple(rows), num_text_columns=0,
    )  # fmt: skip


def sweep_table(work: WorkloadReport) -> Table:
    workload = work.workload
    factor = f"x {title_of(workload.reference)}"
    columns = ("concurrency", "method", f"tokens/s/{workload.per}", "tokens/s/user", factor, TAU)
    has_lost = any(each.lost for line in work.sweep for each in line.by_method.values())
    rows = [
        (line.name, title_of(name), rate_text(each.rate), rate_text(each.user_rate),
         "" if name == workload.reference else factor_text(each.speedup), tau_text(each.tau_of_drafting_passes),
         *((str(each.lost),) if has_lost else ()))
        for line in work.sweep for name, each in line.by_method.items()
    ]  # fmt: skip
    return Table(
        title=f"At equal concurrency: {workload.title}", rows=tuple(rows), num_text_columns=2,
        columns=columns + (("lost",) if has_lost else ()),
    )  # fmt: skip


def latency_tables(work: Workload) -> Iterator[Table]:
    """Percentiles: a table for each latency that was measured."""
    for name, title in LATENCY_TITLES.items():
        rows = [
            (str(point.concurrency), series.title, *(_milliseconds(value) for value in (d.p50, d.p90, d.p99)))
            for point, series in _points(work)
            if (d := point.latencies.get(name)) is not None
        ]
        if rows:
            columns = ("concurrency", "method", "p50", "p90", "p99")
            yield Table(title=f"{title}, ms: {work.title}", columns=columns, rows=tuple(rows), num_text_columns=2)


def goodput_table(work: Workload) -> Table:
    """Requests that met every limit, as AIPerf counted them."""
    rows = [
        (str(p.concurrency), series.title, f"{p.goodput:.2f}", f"{(p.good_requests or 0) / p.sent:.0%}")
        for p, series in _points(work) if p.good_requests is not None
    ]  # fmt: skip
    return Table(
        title=f"Goodput, {work.goodput}: {work.title}", rows=tuple(rows), num_text_columns=2,
        columns=("concurrency", "method", "good requests/s", "share of those sent"),
    )  # fmt: skip


def _points(work: Workload) -> list[tuple[BenchPoint, MethodSeries]]:
    """Points in which a request completed, by concurrency and then by method."""
    found = [(point, series) for series in work.series for point in series.points if point.rows]
    return sorted(found, key=lambda each: each[0].concurrency)


def _milliseconds(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def _reached(curve: SpeedCurve, at: AtSpeed) -> str:
    rate = at.gpu_rates[curve.name]
    if rate is None:
        return "not measured" if curve.front and at.user_rate < curve.front[-1].user_rate else "not reached"
    return rate_text(rate)


def task_table(report: BenchReport, task: TaskReport) -> Table:
    """Tokens/s of one request, speed-up and tau of each method."""
    compared = [name for name in report.titles if name != report.reference]
    columns: tuple[str, ...] = ("task", "concurrency", f"{title_of(report.reference)}, tokens/s")
    for name in compared:
        columns += (f"{report.titles[name]}, tokens/s", "speed-up", TAU)
    rows = []
    for row in task.rows:
        cells = [row.name, str(row.concurrency), *_task_cells(row, report.reference)[:1]]
        rows.append((*cells, *(cell for name in compared for cell in _task_cells(row, name))))
    if (mean := task.average) is not None:
        name = "average" if mean.num_rows == len(task.rows) else f"average of {mean.num_rows}"
        cells = [name, "", ""]
        for method in compared:
            cells += ["", f"{mean.speedups[method]:.2f}x", tau_text(mean.taus_of_drafting_passes.get(method))]
        rows.append(tuple(cells))
    return Table(title=f"Tokens/s of one request: {task.title}", columns=columns, rows=tuple(rows))


def _task_cells(row: ComparisonRow, method: str) -> tuple[str, str, str]:
    measured = row.by_method.get(method)
    if measured is None:
        return NONE, NONE, NONE
    return rate_text(measured.rate), factor_text(measured.speedup), tau_text(measured.tau_of_drafting_passes)
