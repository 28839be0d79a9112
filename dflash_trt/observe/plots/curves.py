# SPDX-License-Identifier: Apache-2.0
"""Throughput against one user's speed, measured or predicted, drawn with matplotlib: SVG for pages, PNG for slides."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from dflash_trt.observe.plots.frontier import rate_between
from dflash_trt.observe.plots.method_styles import Style

WIDE, NARROW = (8.5, 5.0), (4.2, 4.2)  # inches: for a desktop's page or a slide, and for a telephone
GREY = "#5a5a5a"
LABEL_ROOM = 22, 11  # points around a label in which there is no other
# points of the line between two measurements: it is straight in tokens/s, but curved on a logarithmic axis
LINE_STEPS = 8


class PlotPoint(msgspec.Struct, frozen=True, kw_only=True):
    user_rate: float
    """Tokens a second of one user."""
    gpu_rate: float
    """Tokens a second of all users, per GPU or per server."""
    label: str
    is_best: bool = True
    """Whether the point is Pareto-optimal: the line connects these, and others are hollow."""
    low: tuple[float, float] | None = None
    """(user_rate, gpu_rate) at the low end of a prediction's band, and below at its high end."""
    high: tuple[float, float] | None = None


class PlotCurve(msgspec.Struct, frozen=True):
    title: str
    style: Style
    points: tuple[PlotPoint, ...]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """A plot: its heading and its curves."""

    title: str
    detail: str
    per: str
    """The unit of throughput: per GPU or per server."""
    labels: str
    """Meaning of the labels at the markers."""
    curves: tuple[PlotCurve, ...]

    @property
    def description(self) -> str:
        """The picture in words, for screen readers."""
        curves = (
            f"{curve.title}: " + ", ".join(f"{p.user_rate:.1f} and {p.gpu_rate:.1f} at {p.label}" for p in curve.points)
            for curve in self.curves
        )
        return f"tokens/s of one user and tokens/s per {self.per}; {'; '.join(curves)}"


def draw(plot: Plot, size: tuple[float, float] = WIDE, *, has_heading: bool = False) -> Figure:
    """The figure; a page has its own heading, a PNG needs one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=160, layout="constrained")
    axes = figure.subplots()
    for curve in plot.curves:
        _draw_curve(axes, curve)
    if has_heading:
        axes.set_title(f"{plot.title}\n", loc="left", fontweight="bold", parse_math=False)
        axes.text(0, 1.02, plot.detail, transform=axes.transAxes, color=GREY, fontsize="small", parse_math=False)
    axes.set_xlabel(f"tokens/s of one user; at the markers: {plot.labels}")
    axes.set_ylabel(f"tokens/s per {plot.per}, logarithmic")
    _scale(axes, plot)
    axes.grid(which="both", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", framealpha=0.9, edgecolor="none")
    figure.draw_without_rendering()  # settles the layout, so that labels can keep clear of each other
    _label(axes, plot)
    return figure


def svg(plot: Plot, size: tuple[float, float] = WIDE) -> str:
    """The plot as a file: the same bytes for the same plot and release of matplotlib."""
    import matplotlib

    stream = io.StringIO()
    metadata = {"Title": plot.title, "Description": plot.description, "Creator": "dflash-trt", "Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "dflash-trt", "svg.fonttype": "none"}):
        draw(plot, size).savefig(stream, format="svg", metadata=metadata)
    return stream.getvalue()


def _draw_curve(axes: Axes, curve: PlotCurve) -> None:
    line = curve.style.line()
    front = sorted((p for p in curve.points if p.is_best), key=lambda p: -p.user_rate)
    banded = [(p.low, p.high) for p in front if p.low is not None and p.high is not None]
    corners = [low for low, _ in banded] + [high for _, high in reversed(banded)]
    if corners:
        axes.fill([x for x, _ in corners], [y for _, y in corners], color=curve.style.color, alpha=0.15, linewidth=0)
    places = list(_line_places(front))
    axes.plot([x for x, _ in places], [y for _, y in places], **line | {"marker": ""})  # type: ignore[arg-type]
    axes.plot([], [], **line, markersize=5, label=curve.title)  # type: ignore[arg-type]  # the legend's
    for points, fill in ((front, curve.style.color), ([p for p in curve.points if not p.is_best], "white")):
        axes.plot([p.user_rate for p in points], [p.gpu_rate for p in points], linestyle="", color=curve.style.color,
                  marker=curve.style.marker, markersize=5, markerfacecolor=fill)  # fmt: skip


def _line_places(front: Sequence[PlotPoint]) -> Iterator[tuple[float, float]]:
    """Through the best points, fastest user first."""
    yield from ((p.user_rate, p.gpu_rate) for p in front[:1])
    for fast, slow in pairwise(front):
        for share in range(1, LINE_STEPS):
            user = fast.user_rate + (slow.user_rate - fast.user_rate) * share / LINE_STEPS
            rate = rate_between(front, user)
            assert rate is not None, "between two of its points"
            yield user, rate
        yield slow.user_rate, slow.gpu_rate


def _scale(axes: Axes, plot: Plot) -> None:
    """Speeds from 0; throughput logarithmic, with a number at 1, 2 and 5 times powers of ten, or at round steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    rates = [p.gpu_rate for curve in plot.curves for p in curve.points]
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    is_short = max(rates, default=1) < 8 * min(rates, default=1)
    axes.yaxis.set_major_locator(MaxNLocator(6) if is_short else LogLocator(subs=(1, 2, 5), numticks=30))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 5 else f"{value:g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label(axes: Axes, plot: Plot) -> None:
    """Places labels above and right of markers without overlapping other labels or markers; ends of curves first."""
    width, height = LABEL_ROOM
    points_per_pixel = 72 / axes.figure.dpi
    places = {
        point: axes.transData.transform((point.user_rate, point.gpu_rate)) * points_per_pixel
        for curve in plot.curves for point in curve.points
    }  # fmt: skip
    labels: list[tuple[float, float]] = []
    ordered = [point for curve in plot.curves for point in (curve.points[:1] + curve.points[-1:])]
    for point in dict.fromkeys([*ordered, *places]):
        x, y = places[point]
        is_clear = all(abs(x - a) > width or abs(y - b) > height for a, b in labels)
        is_on_marker = any(2 < a - x < width - 4 and 1 < b - y < height + 3 for a, b in places.values())
        if is_clear and (point in ordered or not is_on_marker):
            labels.append((x, y))
            axes.annotate(point.label, (point.user_rate, point.gpu_rate), textcoords="offset points", xytext=(4, 4),
                          color=GREY, fontsize="x-small", parse_math=False, in_layout=False)  # fmt: skip
