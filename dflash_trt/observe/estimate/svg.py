# SPDX-License-Identifier: Apache-2.0
"""The curve as inline SVG: one user's speed across, throughput per GPU up, logarithmic; colours come from the page."""

from __future__ import annotations

from html import escape

from dflash_trt.observe.estimate.report import Curve, Estimate
from dflash_trt.observe.plots.axes import HEIGHT, WIDTH, Axes, axes_around, grid, mark
from dflash_trt.observe.plots.methods import STYLES, TITLES


def curve_svg(result: Estimate) -> str:
    """The picture, with a title for screen readers and a tooltip on each point."""
    entries = [entry for curve in result.curves for entry in curve.points]
    axes = axes_around(
        max(e.user_rate.high for e in entries), min(e.gpu_rate.low for e in entries),
        max(e.gpu_rate.high for e in entries),
    )  # fmt: skip
    body = [
        grid(axes, "tokens/s of one user", "tokens/s per GPU"),
        *(_curve(axes, curve) for curve in result.curves if curve.points),
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="throughput per GPU against tokens a second of'
        f' one user, for plain decoding, EAGLE-3 and DFlash">{"".join(body)}</svg>'
    )


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
        outline = mark(STYLES[method].mark, axes.x(x), axes.y(y))
        marks.append(f'<path class="mark {method}" d="{outline}"><title>{escape(tip)}</title></path>')
    x, y = middle[0]
    label = f'<text class="name {method}" x="{axes.x(x) + 8:.1f}" y="{axes.y(y) + 14:.1f}">{TITLES[method]}</text>'
    return (
        f'<polygon class="band {method}" points="{axes.path([*low, *reversed(high)])}"/>'
        f'<polyline class="curve {method}" points="{axes.path(middle)}"/>{"".join(marks)}{label}'
    )
