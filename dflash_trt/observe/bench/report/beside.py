# SPDX-License-Identifier: Apache-2.0
"""A run beside published rows: measured figures where target, prompts and concurrency are the row's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.deploy.trained_target import is_copy
from dflash_trt.observe.bench.report.equal_concurrency import MethodFigures
from dflash_trt.observe.bench.report.published_rows import Figures, PublishedRow, PublishedSet
from dflash_trt.observe.bench.report.run_tables import NONE, TAU, factor_text, tau_text
from dflash_trt.observe.bench.report.workloads import MethodSeries, Workload
from dflash_trt.observe.pages.page_templates import Table
from dflash_trt.observe.plots.method_styles import TITLES

COLUMNS = (
    "table", "target", "prompts", "concurrency", "where", "method", "published", "tau", "measured", TAU, "differs in",
)  # fmt: skip
Sweep = tuple[Workload, dict[int, dict[str, MethodFigures]]]
"""A set of prompts, with the figures of each concurrency and method, over decoding without speculation."""


class BesideRow(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a published row, and the run's figures of it."""

    row: PublishedRow
    method: str
    draft: str = ""
    """Column of EAGLE-3."""
    published: Figures
    measured: MethodFigures | None = None
    remark: str
    """Settings in which the run differs; without a measurement, the reason why none can be compared."""


def beside(sweeps: Sequence[Sweep], rows: PublishedSet) -> tuple[BesideRow, ...]:
    """Every published row and method, in their order, with the figures that the `sweeps` have of it."""
    found = []
    for row in rows.rows:
        for (method, draft), figures in row.figures().items():
            measured, remark = _measured(row, method, sweeps)
            found.append(
                BesideRow(row=row, method=method, draft=draft, published=figures, measured=measured, remark=remark)
            )
    return tuple(found)


def _measured(row: PublishedRow, method: str, sweeps: Sequence[Sweep]) -> tuple[MethodFigures | None, str]:
    """The run's figures that the row can be compared with, and a remark."""
    if row.task is None:
        return None, "prompts that bench has not, or an average of several sets"
    with_prompts = [each for each in sweeps if (each[0].prompt_set, each[0].category) == (row.task, row.category)]
    if not with_prompts:
        return None, "other prompts"
    with_target = [
        (series, figures)
        for work, figures in with_prompts
        for series in work.series
        if series.name.startswith(method) and is_copy(series.method.model, row.target)
    ]
    if not with_target:
        return None, f"no {TITLES[method]} on this target"
    for series, figures in with_target:
        for concurrency, by_method in figures.items():
            same = series.name in by_method and by_method[series.name].speedup is not None
            if same and row.concurrency in (None, concurrency):
                return by_method[series.name], _differences(row, series, concurrency)
    return None, f"not measured at {row.concurrency} requests without speculation and with it"


def _differences(row: PublishedRow, series: MethodSeries, concurrency: int) -> str:
    """Facts of the run that the row states otherwise, or not at all."""
    run, request = series.run, series.run.request
    remarks = [f"where: {run.server or 'hardware not stated'}, {series.method.runtime}"]
    if row.concurrency is None:
        remarks.append(f"concurrency {concurrency}; the row's is not stated")
    if request.temperature != row.temperature:
        remarks.append(f"temperature {request.temperature:g}")
    if row.thinking is not None and request.thinking != ("on" if row.thinking else "off"):
        remarks.append(f"thinking {request.thinking or 'not set'}")
    if request.template != "chat":
        remarks.append("no chat template")
    return "; ".join(remarks)


def beside_table(rows: Sequence[BesideRow], published: PublishedSet) -> Table:
    """One line for each method of each row."""
    lines = []
    for each in rows:
        row, measured = each.row, each.measured
        requests = "?" if row.concurrency is None else str(row.concurrency)
        method = f"{TITLES[each.method]}{f', {each.draft}' if each.draft else ''}"
        lines.append((
            row.table, row.target, f"{row.prompts}{', thinking' if row.thinking else ''}", requests, row.where, method,
            f"{each.published.speedup:g}x", NONE if each.published.tau is None else f"{each.published.tau:g}",
            NONE if measured is None else factor_text(measured.speedup),
            NONE if measured is None else tau_text(measured.tau_of_drafting_passes),
            each.remark,
        ))  # fmt: skip
    return Table(title=f"Published: {published.title}", columns=COLUMNS, rows=tuple(lines))
