# SPDX-License-Identifier: Apache-2.0
"""PNG files of `verify --plot` and `recover --plot`, marked as ours: only marked files are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt import __version__
from dflash_trt.files.write import OutputKind, bearing, new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dflash_trt.runtime.measure.recovery.training_state import Progress
    from dflash_trt.runtime.measure.verification_report import DrafterError, EngineReport, VerificationReport

CHUNK = b"tEXtSoftware\0dflash-trt "  # PNG, 11.3.4.3: keyword, null, text; it stands before the image


# Okabe and Ito's palette; lines differ in marker and dash too.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


def plain_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels, and a light grid below the lines, without a frame."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


PICTURE = OutputKind(
    name="a picture that dflash-trt drew", recognizes=bearing(CHUNK), form="file", option="--plot FILE"
)


def save_picture(figure: Figure, file: Path) -> None:
    """Writes a PNG; raises BuildError if `file` is another file, or cannot be written."""
    with new_file(file, PICTURE, force=True) as new:
        figure.savefig(new, format="png", metadata={"Software": f"dflash-trt {__version__}"})


def draw_verification(report: VerificationReport, file: Path) -> None:
    """Writes a PNG: acceptance by draft position, and with a reference the error by layer beside it."""
    from matplotlib.figure import Figure

    error = None if report.comparison is None else report.comparison.error
    figure = Figure(figsize=(6.4 if error is None else 12, 5), dpi=160, layout="constrained")
    count = len(report.engine.prompts)
    tokens = "tokens identical to" if report.engine.identical else "TOKENS DIFFER from"
    headline = f"{report.engine.source}: {tokens} plain greedy decoding, {count} prompt{'s' if count != 1 else ''}"
    figure.suptitle(headline, x=0.01, ha="left", color=GREY, fontsize="medium")
    columns = figure.subplots(1, 1 if error is None else 2, squeeze=False)[0]
    _draw_acceptance(columns[0], report)
    if error is not None:
        _draw_error(columns[1], error)
    save_picture(figure, file)


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
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    headline, detail = title
    axes.set_title(f"{headline}\n", loc="left", fontweight="bold")
    axes.text(0, 1.025, detail, transform=axes.transAxes, color=GREY)
    plain_axes(axes, x_label, y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, columnspacing=1.2)


AVERAGED = 50  # one dot of the training loss stands for steps / 50 of them


def draw_loss(progress: Progress, recipe: str, file: Path) -> None:
    """Writes a PNG: loss on held-out sequences above that of the dense draft, and as far as it fits, training loss."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    chunks = np.array_split(np.arange(1, len(progress.losses) + 1), min(AVERAGED, len(progress.losses)))
    means = [float(np.mean([progress.losses[step - 1] for step in chunk])) for chunk in chunks]
    axes.plot([float(chunk.mean()) for chunk in chunks], means, ".", color=GREY, label="training (mean of steps)")
    steps, losses = zip(*progress.held_out, strict=True)
    axes.plot(steps, losses, "o-", color=BLUE, label=f"held out, {recipe}")
    dense = progress.dense_held_out
    axes.axhline(dense, color=ORANGE, linestyle="--", label="held out, as given (not quantised)")
    axes.fill_between(steps, losses, dense, color=BLUE, alpha=0.12, linewidth=0)  # the loss that is left
    low, high = min(dense, *losses), max(dense, *losses)
    axes.set_ylim(low - 0.5 * (high - low) - 1e-3, high + 0.5 * (high - low) + 1e-3)
    axes.set_title(_loss_headline(progress), loc="left", fontweight="bold")
    plain_axes(axes, "steps", "loss (nats, slots weighted)")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, columnspacing=1.2)
    save_picture(figure, file)


def _loss_headline(progress: Progress) -> str:
    """Share of the quantisation loss that was recovered."""
    before, after, dense = progress.held_out[0][1], progress.held_out[-1][1], progress.dense_held_out
    if after < before > dense:
        return f"{(before - after) / (before - dense):.0%} of the quantised draft's extra loss is gone"
    return f"Held-out loss {before:.3f} -> {after:.3f}"
