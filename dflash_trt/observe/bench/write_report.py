# SPDX-License-Identifier: Apache-2.0
"""The directory of a report: the page as HTML and Markdown, and each curve as SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dflash_trt.files.write import OutputKind, new_directory
from dflash_trt.observe.bench import report_tables
from dflash_trt.observe.bench.comparison_report import BenchReport
from dflash_trt.observe.bench.speed_curve import NUM_SAMPLES
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
    """The page as text; the same report gives the same bytes. `drawn` are wide curves by name, if there already."""
    pictures = [
        {"file": f"{name}.svg", "alt": plot.description}
        | ({"wide": drawn.get(name) or svg(plot), "narrow": svg(plot, NARROW)} if style == "html" else {})
        if plot.curves else None
        for name, plot in _plots(report)
    ]  # fmt: skip
    return render(
        "bench_report.j2", style, report=report, tables=report_tables, num_samples=NUM_SAMPLES, pictures=pictures
    )


def _plots(report: BenchReport) -> Iterator[tuple[str, Plot]]:
    """File names without ending, and pictures; one without curves where no method has a point."""
    for index, work in enumerate(report.workloads, start=1):
        number = f"-{index}" if len(report.workloads) > 1 else ""
        yield f"pareto{number}", report_tables.workload_plot(report, work)
