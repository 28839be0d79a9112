# SPDX-License-Identifier: Apache-2.0
"""The same curves as a PNG, for slides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dflash_trt.observe.plots.curve_svg import X_TITLE, Drawn, line_places, y_title
from dflash_trt.observe.plots.methods import Style

MARKERS = {"square": "s", "triangle": "^", "circle": "o", "diamond": "D", "cross": "X"}


def curves_figure(title: str, detail: str, per: str, curves: Sequence[Drawn]) -> Figure:
    """One curve per method; hollow marks are points that another beats."""
    figure = Figure(figsize=(8.5, 5.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    for one in curves:
        _draw(axes, one)
    axes.set_title(f"{title}\n", loc="left", fontweight="bold")
    axes.text(0, 1.02, detail, transform=axes.transAxes, color="#666666", parse_math=False)
    axes.set_xlabel(X_TITLE)
    axes.set_ylabel(y_title(per))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(_minor))
    axes.set_xlim(left=0)
    axes.grid(which="both", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    return figure


def line_style(style: Style) -> dict[str, Any]:
    """As matplotlib takes it."""
    dash = tuple(float(number) / 2.2 for number in style.dash.split())
    return {
        "color": style.color,
        "linestyle": (0, dash) if dash else "-",
        "marker": MARKERS[style.mark],
        "markersize": 5,
    }


def _minor(value: float, _: int) -> str:
    """2 and 5 times a power of ten."""
    return f"{value:,.0f}" if f"{value:e}"[0] in "25" else ""


def _draw(axes: Axes, one: Drawn) -> None:
    style = line_style(one.style)
    best = sorted((point for point in one.marks if point.is_best), key=lambda p: p.user_rate)
    places, blank = line_places(one), {"linestyle": ""}
    axes.plot([x for x, _ in places], [y for _, y in places], **style | {"marker": ""})
    axes.plot([p.user_rate for p in best], [p.gpu_rate for p in best], **style | blank)
    axes.plot([], [], **style, label=one.title)  # the legend's
    beaten = [point for point in one.marks if not point.is_best]
    axes.plot([p.user_rate for p in beaten], [p.gpu_rate for p in beaten],
              **style | blank, markerfacecolor="white")  # fmt: skip
    for point in (best[0], best[-1]) if len(best) > 1 else best:
        axes.annotate(point.label, (point.user_rate, point.gpu_rate), textcoords="offset points", xytext=(4, 5),
                      color="#5a5a5a", fontsize="x-small", parse_math=False)  # fmt: skip
