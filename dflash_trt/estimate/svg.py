# SPDX-License-Identifier: Apache-2.0
"""The curve as inline SVG: one user's speed across, throughput per GPU up, logarithmic; colours come from the page."""

from __future__ import annotations

import math
from html import escape

from dflash_trt.estimate.report import Curve, Estimate

WIDTH, HEIGHT = 900, 470
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 16, 52
TITLES = {"none": "plain", "eagle3": "EAGLE-3", "dflash": "DFlash"}
MARK = 4.0


class Axes:
    """Data to pixels."""

    def __init__(self, x_max: float, y_min: float, y_max: float) -> None:
        self.x_max, self.y_min, self.y_max = x_max, y_min, y_max

    def x(self, value: float) -> float:
        """Linear from 0."""
        return LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Logarithmic."""
        share = math.log(max(value, self.y_min) / self.y_min) / math.log(self.y_max / self.y_min)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: list[tuple[float, float]]) -> str:
        """As an SVG polyline's points."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def curve_svg(result: Estimate) -> str:
    """The picture, with a title for screen readers and a tooltip on each point."""
    entries = [entry for curve in result.curves for entry in curve.points]
    x_max = _round_up(max(entry.user_rate.high for entry in entries))
    lowest, highest = min(e.gpu_rate.low for e in entries), max(e.gpu_rate.high for e in entries)
    axes = Axes(x_max, 10 ** math.floor(math.log10(lowest)), highest * 1.25)
    body = [_grid(axes), *(_curve(axes, curve) for curve in result.curves if curve.points)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput per GPU against tokens a second of'
        f' one user, for plain decoding, EAGLE-3 and DFlash">{"".join(body)}</svg>'
    )


def _grid(axes: Axes) -> str:
    parts = []
    step = _round_up(axes.x_max / 8)
    for index in range(int(axes.x_max / step) + 1):
        x = axes.x(index * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{index * step:,.0f}</text>'
        )
    power = axes.y_min
    while power <= axes.y_max:
        for value in (power, 2 * power, 5 * power):
            if value <= axes.y_max:
                y = axes.y(value)
                parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
                parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
        power *= 10
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">tokens/s of one user</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(16 {height:.0f}) rotate(-90)" text-anchor="middle">tokens/s per GPU</text>'
    )
    return "".join(parts)


def _curve(axes: Axes, curve: Curve) -> str:
    method = curve.method
    middle = [(entry.user_rate.value, entry.gpu_rate.value) for entry in curve.points]
    low = [(entry.user_rate.low, entry.gpu_rate.low) for entry in curve.points]
    high = [(entry.user_rate.high, entry.gpu_rate.high) for entry in curve.points]
    marks = []
    for entry, (x, y) in zip(curve.points, middle, strict=True):
        p = entry.point
        tip = (
            f"{TITLES[method]}, batch {p.batch}, {p.draft_tokens} drafts: {x:,.0f} tokens/s/user, {y:,.0f} tokens/s/GPU"
        )
        marks.append(f"{_mark(method, axes.x(x), axes.y(y))}<title>{escape(tip)}</title></path>")
    x, y = middle[0]
    label = f'<text class="name {method}" x="{axes.x(x) + 8:.1f}" y="{axes.y(y) + 14:.1f}">{TITLES[method]}</text>'
    return (
        f'<polygon class="band {method}" points="{axes.path([*low, *reversed(high)])}"/>'
        f'<polyline class="curve {method}" points="{axes.path(middle)}"/>{"".join(marks)}{label}'
    )


def _mark(method: str, x: float, y: float) -> str:
    """Square, triangle or circle: methods differ without their colour."""
    m = MARK
    shapes = {
        "none": f"M{x - m:.1f} {y - m:.1f}h{2 * m}v{2 * m}h-{2 * m}z",
        "eagle3": f"M{x:.1f} {y - m:.1f}l{m} {2 * m}h-{2 * m}z",
        "dflash": f"M{x - m:.1f} {y:.1f}a{m} {m} 0 1 0 {2 * m} 0a{m} {m} 0 1 0 -{2 * m} 0z",
    }
    return f'<path class="mark {method}" d="{shapes[method]}">'


def _round_up(value: float) -> float:
    """To 1, 2, 2.5 or 5 times a power of ten, or the next such."""
    power = 10 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value))
