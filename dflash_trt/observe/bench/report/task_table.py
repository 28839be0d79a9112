# SPDX-License-Identifier: Apache-2.0
"""Table of a task: tokens/s of one request, speed-up and acceptance of each method."""

from __future__ import annotations

from dflash_trt.observe.bench.report.bench_report import BenchReport
from dflash_trt.observe.bench.report.cell_text import NONE, TAU, factor_text, rate_text, tau_text, title_of
from dflash_trt.observe.bench.report.equal_concurrency import ComparisonRow
from dflash_trt.observe.bench.report.tasks import TaskReport
from dflash_trt.observe.pages.page_templates import Table


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
