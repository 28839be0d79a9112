# SPDX-License-Identifier: Apache-2.0
"""The picture of `dflash-trt recover --plot`: how the loss fell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dflash_trt.files.picture import save_picture
from dflash_trt.quantize.recovery.training_state import Progress

# Okabe and Ito's palette, as in verify's picture.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
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
    axes.set_xlabel("steps")
    axes.set_ylabel("loss (nats, slots weighted)")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_picture(figure, file)


def _headline(progress: Progress) -> str:
    """What was won of what quantising had cost."""
    before, after, dense = progress.held_out[0][1], progress.held_out[-1][1], progress.dense_held_out
    if after < before > dense:
        return f"{(before - after) / (before - dense):.0%} of the quantised draft's extra loss is gone"
    return f"Held-out loss {before:.3f} -> {after:.3f}"
