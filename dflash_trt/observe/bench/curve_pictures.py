# SPDX-License-Identifier: Apache-2.0
"""A report's curves as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_trt.observe.bench.blocks import Picture
from dflash_trt.observe.bench.comparison_report import Report, WorkloadReport
from dflash_trt.observe.plots.curve_svg import Drawn, Mark, curves_svg
from dflash_trt.observe.plots.methods import styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(report: Report, index: int) -> Picture | None:
    """The curve of one workload; None where no method has a point."""
    work = report.workloads[index]
    drawn = _drawn(report, work)
    if not drawn:
        return None
    number = f"-{index + 1}" if len(report.workloads) > 1 else ""
    alt = f"{work.title}: throughput per {work.per} against tokens a second of one user"
    return Picture(f"pareto{number}.svg", curves_svg(alt, work.per, drawn), alt)


def figure(report: Report, index: int, detail: str) -> Figure:
    """The same for a PNG; needs matplotlib."""
    from dflash_trt.observe.plots.curve_png import curves_figure

    work = report.workloads[index]
    return curves_figure(work.title, detail, work.per, _drawn(report, work))


def _drawn(report: Report, work: WorkloadReport) -> tuple[Drawn, ...]:
    of_method = dict(zip(report.methods, styles(report.methods), strict=True))
    drawn = []
    for one in work.curves:
        marks = tuple(
            Mark(
                p.user_rate, p.gpu_rate, str(p.concurrency),
                f"concurrency {p.concurrency}: {p.user_rate:,.1f} tokens/s/user, {p.gpu_rate:,.1f} tokens/s/{work.per}",
                p in one.front,
            )
            for p in one.points
        )  # fmt: skip
        if marks:
            drawn.append(Drawn(one.title, of_method[one.name], marks))
    return tuple(drawn)
