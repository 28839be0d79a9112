# SPDX-License-Identifier: Apache-2.0
"""The picture of `dflash-trt estimate --plot`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dflash_trt.files.picture import save_picture
from dflash_trt.observe.estimate.report import Curve, Estimate
from dflash_trt.observe.plots.curve_png import line_style
from dflash_trt.observe.plots.methods import STYLES, TITLES


def draw(result: Estimate, file: Path) -> None:
    """Writes a PNG: throughput per GPU against one user's speed, with bands."""
    figure = Figure(figsize=(8.5, 5.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    for curve in result.curves:
        _draw_curve(axes, curve)
    system, traffic = result.system, result.traffic
    axes.set_title(f"{system.target.target} on {system.gpu}x{system.num_gpus}: predicted, not measured\n",
                   loc="left", fontweight="bold")  # fmt: skip
    detail = f"{traffic.prompt_tokens} in, {traffic.output_tokens} out; {result.acceptance_source}"
    axes.text(0, 1.02, detail, transform=axes.transAxes, color="#666666")
    axes.set_xlabel("tokens/s of one user")
    axes.set_ylabel("tokens/s per GPU (logarithmic)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(left=0)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    save_picture(figure, file)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    if not curve.points:
        return
    title, style = TITLES[curve.method], STYLES[curve.method]
    color = style.color
    points = curve.points
    axes.plot([p.user_rate.value for p in points], [p.gpu_rate.value for p in points],
              **line_style(style) | {"markersize": 4}, label=title)  # fmt: skip
    low = [(p.user_rate.low, p.gpu_rate.low) for p in points]
    high = [(p.user_rate.high, p.gpu_rate.high) for p in points]
    corners = [*low, *reversed(high)]
    axes.fill([x for x, _ in corners], [y for _, y in corners], color=color, alpha=0.15, linewidth=0)
    axes.annotate(f"batch {points[0].point.batch}", (points[0].user_rate.value, points[0].gpu_rate.value),
                  textcoords="offset points", xytext=(4, -12), color=color, fontsize="small")  # fmt: skip
