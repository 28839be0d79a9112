# SPDX-License-Identifier: Apache-2.0
"""The picture of `dflash-trt recover --plot`: how the loss fell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from dflash_trt.observe.plots.picture import BLUE, GREY, ORANGE, plain_axes, save_picture

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.recovery.training import Progress

AVERAGED = 50  # one dot of the training loss stands for steps / 50 of them


def draw(progress: Progress, recipe: str, file: Path) -> None:
    """Writes a PNG: training loss, loss on held-out sequences, and that of the dense draft."""
    figure = Figure(figsize=(6.4, 4.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    chunks = np.array_split(np.arange(1, len(progress.losses) + 1), min(AVERAGED, len(progress.losses)))
    means = [float(np.mean([progress.losses[step - 1] for step in chunk])) for chunk in chunks]
    axes.plot([float(chunk.mean()) for chunk in chunks], means, ".", color=GREY, label="training (mean of steps)")
    steps, losses = zip(*progress.held_out, strict=True)
    axes.plot(steps, losses, "o-", color=BLUE, label=f"held out, {recipe}")
    axes.axhline(progress.dense_held_out, color=ORANGE, linestyle="--", label="held out, as given (not quantised)")
    axes.set_title(_headline(progress), loc="left", fontweight="bold")
    plain_axes(axes, "steps", "loss (nats, slots weighted)")
    axes.legend(frameon=False)
    save_picture(figure, file)


def _headline(progress: Progress) -> str:
    """What was won of what quantising had cost."""
    before, after, dense = progress.held_out[0][1], progress.held_out[-1][1], progress.dense_held_out
    if after < before > dense:
        return f"{(before - after) / (before - dense):.0%} of the quantised draft's extra loss is gone"
    return f"Held-out loss {before:.3f} -> {after:.3f}"
