# SPDX-License-Identifier: Apache-2.0
"""Measured curves as SVG that stands alone: light and dark, told apart without colours, numbers in the marks' tips."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import msgspec

from dflash_trt.observe.plots.axes import HEIGHT, RIGHT, TOP, WIDTH, Axes, axes_around, grid, mark
from dflash_trt.observe.plots.methods import Style
from dflash_trt.observe.plots.pareto import rate_between

X_TITLE = "tokens/s of one user; at the marks: concurrency"
LABEL_ROOM = 26, 13  # pixels around a label in which there is no other


class Mark(msgspec.Struct, frozen=True):
    """A measured point."""

    user_rate: float
    gpu_rate: float
    label: str
    tip: str
    is_best: bool
    """Whether no other point beats it: the line goes through those."""


class Drawn(msgspec.Struct, frozen=True):
    """One curve."""

    title: str
    style: Style
    marks: tuple[Mark, ...]


def y_title(per: str) -> str:
    """`per` is "GPU" or "server"."""
    return f"tokens/s per {per} (logarithmic)"


def curves_svg(title: str, per: str, curves: Sequence[Drawn]) -> str:
    """The picture; `title` is for screen readers."""
    marks = [point for one in curves for point in one.marks]
    rates = [point.gpu_rate for point in marks]
    axes = axes_around(max(point.user_rate for point in marks), min(rates), max(rates))
    parts = [f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>', grid(axes, X_TITLE, y_title(per))]
    parts += [_line(axes, index, one) for index, one in enumerate(curves)]
    labels: list[tuple[float, float]] = []
    parts += [_marks(axes, index, one, labels) for index, one in enumerate(curves)]
    parts += [_legend(curves)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(title)}"><style>{_css(curves)}</style>{"".join(parts)}</svg>'
    )


def _css(curves: Sequence[Drawn]) -> str:
    light = "svg text{font:13px system-ui,sans-serif;fill:#1b1b1b}svg .tick{fill:#5a5a5a}.ground{fill:#fff}"
    light += "svg .label{font-size:11px}.grid{stroke:#d8d8d8;stroke-width:1}.line{fill:none;stroke-width:2.2}"
    dark = "svg text{fill:#ececec}svg .tick{fill:#a8a8a8}.ground{fill:#16181b}.grid{stroke:#3a3d42}"
    for index, one in enumerate(curves):
        light += f".line.c{index}{{stroke-dasharray:{one.style.dash or 'none'}}}"
        light += _colours(index, one.style.color, "#fff")
        dark += _colours(index, one.style.dark, "#16181b")
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _colours(index: int, color: str, ground: str) -> str:
    c = f".c{index}"
    return f".line{c},.point{c}{{stroke:{color}}}.best{c}{{fill:{color}}}.beaten{c}{{fill:{ground}}}"


def line_places(one: Drawn) -> list[tuple[float, float]]:
    """The line through the best points; between them linear, as it is read, which a logarithmic axis bends."""
    front = sorted((point for point in one.marks if point.is_best), key=lambda p: -p.user_rate)
    places = [(front[0].user_rate, front[0].gpu_rate)] if front else []
    for fast, slow in pairwise(front):
        for share in range(1, 9):
            user = fast.user_rate + (slow.user_rate - fast.user_rate) * share / 8
            rate = rate_between(front, user)
            places.append((user, slow.gpu_rate if share == 8 or rate is None else rate))
    return places


def _line(axes: Axes, index: int, one: Drawn) -> str:
    return f'<polyline class="line c{index}" points="{axes.path(line_places(one))}"/>'


def _marks(axes: Axes, index: int, one: Drawn, labels: list[tuple[float, float]]) -> str:
    parts = []
    for point in one.marks:
        x, y = axes.x(point.user_rate), axes.y(point.gpu_rate)
        kind = "best" if point.is_best else "beaten"
        tip = f"<title>{escape(one.title)}, {escape(point.tip)}</title>"
        parts.append(f'<path class="point {kind} c{index}" d="{mark(one.style.mark, x, y)}">{tip}</path>')
        place = (x - 7, y - 7) if x > WIDTH - RIGHT - LABEL_ROOM[0] else (x + 7, y - 7)
        if all(abs(place[0] - a) > LABEL_ROOM[0] or abs(place[1] - b) > LABEL_ROOM[1] for a, b in labels):
            labels.append(place)
            anchor = "end" if place[0] < x else "start"
            parts.append(
                f'<text class="tick label" x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{anchor}">'
                f"{escape(point.label)}</text>"
            )
    return "".join(parts)


def _legend(curves: Sequence[Drawn]) -> str:
    """At the top right, where fast users and high throughput would meet, and no curve is."""
    widest = max(len(one.title) for one in curves)
    left = WIDTH - RIGHT - 60 - 7.5 * widest
    width, height = WIDTH - RIGHT - left + 10, 22 * len(curves) + 10
    parts = [f'<rect class="ground" x="{left - 10:.0f}" y="{TOP + 2}" width="{width:.0f}" height="{height}"/>']
    for index, one in enumerate(curves):
        y = TOP + 18 + 22 * index
        parts.append(
            f'<path class="line c{index}" d="M{left:.0f} {y}h38"/>'
            f'<path class="point best c{index}" d="{mark(one.style.mark, left + 19, y)}"/>'
            f'<text x="{left + 46:.0f}" y="{y + 4.5}">{escape(one.title)}</text>'
        )
    return "".join(parts)
