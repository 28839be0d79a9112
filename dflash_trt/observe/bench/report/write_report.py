# SPDX-License-Identifier: Apache-2.0
"""The directory of a report: the page as HTML and Markdown, and each curve as SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dflash_trt.files.command import command_line
from dflash_trt.files.write import OutputKind, new_directory
from dflash_trt.observe.bench.report.bench_report import BenchReport, WorkloadReport
from dflash_trt.observe.bench.report.beside import beside_table
from dflash_trt.observe.bench.report.intervals import NUM_SAMPLES
from dflash_trt.observe.bench.report.report_tables import (
    drafts_table,
    goodput_table,
    latency_tables,
    position_tables,
    speed_table,
    sweep_table,
    task_table,
    title,
    workload_plot,
)
from dflash_trt.observe.bench.report.run_tables import run_facts
from dflash_trt.observe.bench.report.run_verdict import verdict
from dflash_trt.observe.bench.report.speed_curve import ends
from dflash_trt.observe.bench.report.workloads import reference_title
from dflash_trt.observe.bench.run_record import BenchRun
from dflash_trt.observe.pages.page_templates import PAGE, render
from dflash_trt.observe.plots.curves import NARROW, Plot, draw, svg
from dflash_trt.observe.plots.picture import save_picture

MARKDOWN, HTML = "report.md", "report.html"


def _is_ours(directory: Path) -> bool:
    file = directory / HTML
    return file.is_file() and PAGE.recognizes(file)


REPORT = OutputKind(name="a report of a bench run", recognizes=_is_ours)


def write_report(directory: Path, report: BenchReport, *, force: bool) -> None:
    """Writes all of it; raises BuildError where something stands there, unless it is a report and `force`."""
    wide = {name: svg(plot) for name, plot in _plots(report) if plot.curves}
    with new_directory(directory, REPORT, force=force) as new:
        (new / MARKDOWN).write_text(render_report(report, "markdown"), encoding="utf-8")
        (new / HTML).write_text(render_report(report, "html", wide), encoding="utf-8")
        for name, plot in _plots(report):
            if plot.curves:
                (new / f"{name}.svg").write_text(wide[name], encoding="utf-8")
                save_picture(draw(plot, has_heading=True), new / f"{name}.png")


def render_report(
    report: BenchReport, style: Literal["html", "markdown"], drawn: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The page as text; the same report gives the same bytes. `drawn`: wide curves by name, if already drawn."""
    pictures = [
        {"file": f"{name}.svg", "alt": plot.description}
        | ({"wide": drawn.get(name) or svg(plot), "narrow": svg(plot, NARROW)} if style == "html" else {})
        if plot.curves else None
        for name, plot in _plots(report)
    ]  # fmt: skip
    return render(
        "bench_report.j2", style, report=report, num_samples=NUM_SAMPLES, title=title(report), verdict=verdict(report),
        over=reference_title(report.reference), tasks=[task_table(report, task) for task in report.tasks],
        curves=[_curve_section(work, picture) for work, picture in zip(report.workloads, pictures, strict=True)],
        beside=None if report.published is None else beside_table(report.beside, report.published),
        beside_note="" if report.published is None else report.published.note,
        runs=[(each.directory.name, _facts(each.run)) for each in report.runs],
    )  # fmt: skip


def _curve_section(report: WorkloadReport, picture: dict[str, str] | None) -> dict[str, object]:
    """Values of a workload's section: its picture, and its tables in order."""
    work = report.workload
    return {
        "title": work.title, "picture": picture, "ends": [ends(curve, work.per) for curve in report.curves],
        "tables": [
            *([speed_table(report)] if report.at_speeds else []), sweep_table(report),
            *([goodput_table(work)] if work.goodput else []), *latency_tables(work),
        ],
        "drafts": drafts_table(work), "positions": list(position_tables(work)),
    }  # fmt: skip


def _facts(run: BenchRun) -> list[str]:
    return [*(f"{name}: {value}" for name, value in run_facts(run)), f"command: {command_line(run.command)}"]


def _plots(report: BenchReport) -> Iterator[tuple[str, Plot]]:
    """File names without ending, and pictures; one without curves where no method has a point."""
    for index, work in enumerate(report.workloads, start=1):
        number = f"-{index}" if len(report.workloads) > 1 else ""
        yield f"pareto{number}", workload_plot(report, work)
