# SPDX-License-Identifier: Apache-2.0
"""The picture of `dflash-trt verify --plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dflash_trt.observe.plots.picture import BLUE, GREEN, GREY, ORANGE, plain_axes, save_picture

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.verification_report import DrafterError, EngineReport, VerificationReport


def draw(report: VerificationReport, file: Path) -> None:
    """Writes a PNG: acceptance by draft position, and with a reference the error by layer beside it."""
    error = None if report.comparison is None else report.comparison.error
    figure = Figure(figsize=(6.4 if error is None else 12, 5), dpi=160, layout="constrained")
    figure.suptitle(_headline(report.engine), x=0.01, ha="left", color=GREY, fontsize="medium")
    columns = figure.subplots(1, 1 if error is None else 2, squeeze=False)[0]
    _draw_acceptance(columns[0], report)
    if error is not None:
        _draw_error(columns[1], error)
    save_picture(figure, file)


def _headline(engine: EngineReport) -> str:
    count = len(engine.prompts)
    tokens = "tokens identical to" if engine.identical else "TOKENS DIFFER from"
    return f"{engine.source}: {tokens} plain greedy decoding, {count} prompt{'s' if count != 1 else ''}"


def _draw_acceptance(axes: Axes, report: VerificationReport) -> None:
    if report.reference is not None:
        _plot_acceptance(axes, report.reference, "reference", GREY, "s--")
    _plot_acceptance(axes, report.engine, "engine", BLUE, "o-")
    _finish(axes, _acceptance_title(report), "draft position in the block", "proposals accepted (%)")
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])


def _plot_acceptance(axes: Axes, engine: EngineReport, name: str, color: str, style: str) -> None:
    points = [(entry.position, entry.share) for entry in engine.acceptance if entry.share is not None]
    label = name if engine.tau is None else f"{name}: tau {engine.tau:.2f} tokens a pass"
    axes.plot([k for k, _ in points], [share for _, share in points], style, color=color, label=label)


def _acceptance_title(report: VerificationReport) -> tuple[str, str]:
    """Headline and detail."""
    passes = f"over {report.engine.steps} verify passes"
    if report.engine.tau is None:
        return "No prompt had a verify pass", ""
    if report.comparison is None or report.comparison.tau_loss is None:
        return f"{report.engine.tau:.2f} tokens per verify pass", passes
    loss = report.comparison.tau_loss
    headline = f"{abs(loss.loss):.1%} of tau {'lost' if loss.loss >= 0 else 'gained'} against the reference"
    if loss.low is None or loss.high is None:
        return headline, passes
    return headline, f"{loss.confidence:.0%} interval of the loss: {loss.low:.1%} to {loss.high:.1%}"


def _draw_error(axes: Axes, error: DrafterError) -> None:
    layers = [entry.layer for entry in error.layers]
    norm = len(layers)  # drawn one step after the last layer
    outputs = [entry.output for entry in error.layers]
    axes.plot(layers, outputs, "o-", color=BLUE, label="residual stream after the layer")
    axes.plot([norm], [error.hidden], "D", color=BLUE, markerfacecolor="white", label="final hidden, after the norm")
    axes.plot(layers, [entry.k for entry in error.layers], "^--", color=ORANGE, label="context K")
    axes.plot(layers, [entry.v for entry in error.layers], "v:", color=GREEN, label="context V")
    title = (f"Final hidden states are {error.hidden:.1%} off", f"mean of {error.num_blocks} blocks of real decoding")
    _finish(axes, title, "draft layer", "relative error (% of the reference's norm)")
    axes.set_xticks([*layers, norm], [*map(str, layers), "norm"])
    axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])


def _finish(axes: Axes, title: tuple[str, str], x_label: str, y_label: str) -> None:
    headline, detail = title
    axes.set_title(f"{headline}\n", loc="left", fontweight="bold")
    axes.text(0, 1.025, detail, transform=axes.transAxes, color=GREY)
    plain_axes(axes, x_label, y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, columnspacing=1.2)
