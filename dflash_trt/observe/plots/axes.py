# SPDX-License-Identifier: Apache-2.0
"""The ground of a curve in SVG: one user's speed across, throughput up, logarithmic; the scales, grid and marks."""

from __future__ import annotations

import math

WIDTH, HEIGHT = 900, 470
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 16, 52
MARK = 4.0
STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


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


def axes_around(x_highest: float, y_lowest: float, y_highest: float) -> Axes:
    """Axes that hold all of it: x from 0 to a round number, y from a power of ten."""
    return Axes(round_up(x_highest), 10 ** math.floor(math.log10(y_lowest)), y_highest * 1.25)


def grid(axes: Axes, x_title: str, y_title: str) -> str:
    """Lines, ticks and the axes' titles."""
    parts = []
    step = round_up(axes.x_max / 8)
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
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{x_title}</text>')
    height = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(16 {height:.0f}) rotate(-90)" text-anchor="middle">{y_title}</text>')
    return "".join(parts)


def mark(shape: str, x: float, y: float) -> str:
    """The outline of a mark around x, y, as an SVG path: methods differ without their colour."""
    m = MARK
    return {
        "square": f"M{x - m:.1f} {y - m:.1f}h{2 * m}v{2 * m}h-{2 * m}z",
        "triangle": f"M{x:.1f} {y - m:.1f}l{m} {2 * m}h-{2 * m}z",
        "circle": f"M{x - m:.1f} {y:.1f}a{m} {m} 0 1 0 {2 * m} 0a{m} {m} 0 1 0 -{2 * m} 0z",
        "diamond": f"M{x:.1f} {y - 1.3 * m:.1f}l{m} {1.3 * m}l-{m} {1.3 * m}l-{m} -{1.3 * m}z",
        "cross": f"M{x - m:.1f} {y - m:.1f}l{2 * m} {2 * m}m0 -{2 * m}l-{2 * m} {2 * m}",
    }[shape]


def round_up(value: float) -> float:
    """To 1, 2, 2.5 or 5 times a power of ten, or the next such."""
    power = 10 ** math.floor(math.log10(value))
    return float(next(step * power for step in STEPS if step * power >= value))
