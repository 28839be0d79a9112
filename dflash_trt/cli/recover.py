# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt recover`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.completion import DRAFT
from dflash_trt.cli.options import PATH, FiniteRange, check_picture, force_option, options
from dflash_trt.cli.output import resumable
from dflash_trt.cli.recipes import (
    build_command,
    calibration_option,
    describe,
    features_option,
    read_checked_draft,
    recipe_and_ranges,
    recipe_option,
    target_option,
)
from dflash_trt.cli.settings import runtime_options
from dflash_trt.errors import VerificationError
from dflash_trt.runtime.measure.recovery.settings import Settings

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.recovery.training_state import Progress

DEFAULTS = Settings()
SECONDS_BETWEEN_LINES = 10


@click.command(short_help="Train a draft for quantisation, then quantise it.")
@click.argument("draft", type=DRAFT)
@options(
    click.option("-o", "--output", required=True, type=PATH, help="Checkpoint directory to write."),
    recipe_option,
    features_option,
    click.option("--steps", type=click.IntRange(min=1), default=DEFAULTS.steps, show_default=True,
                 help="Training steps."),
    click.option("--seed", type=click.IntRange(min=0), default=DEFAULTS.seed, show_default=True,
                 help="Seed of the training."),
    click.option("--learning-rate", type=FiniteRange(min=0, min_open=True), default=DEFAULTS.learning_rate,
                 show_default=True, help="Peak learning rate."),
    click.option("--distillation", metavar="SHARE", type=FiniteRange(0, 1), default=DEFAULTS.distillation,
                 show_default=True,
                 help="Weight of the divergence from the draft as given; the rest of the loss is on the target's own"
                 " tokens."),
    click.option("--plot", metavar="FILE", type=PATH, help="Plot the loss to this PNG file."),
    target_option,
    calibration_option,
    force_option,
    runtime_options("device"),
    click.option("--threads", type=click.IntRange(0, 1024), default=0, show_default=True,
                 help="Threads for training and packing; 0: chosen by the draft's size."),
)  # fmt: skip
def recover(
    draft: str, output: Path, recipe: str, features: Path, plot: Path | None, target: str | None, calibration: str,
    force: bool, device: str, threads: int, **settings: Any,
) -> None:  # fmt: skip
    """Train DRAFT as --recipe will quantise it, on the target's own answers, then write the quantised copy.

    After an interruption the same command continues. On a CPU the same seed and number of threads give the same
    bytes on the same machine. Exits with 1 if the loss on held-out sequences did not fall.

    \b
    Example:
      dflash-trt recover z-lab/gpt-oss-120b-DFlash -o draft-nvfp4 --recipe nvfp4 \\
          --features features.safetensors --steps 2000 --plot loss.png
    """
    check_picture(plot)
    checkpoint = read_checked_draft(draft, target)
    loaded, ranges = recipe_and_ranges(checkpoint, recipe, calibration, device)
    from dflash_trt.runtime.measure.recovery.recover import recover_checkpoint
    from dflash_trt.runtime.measure.recovery.training_state import state_file

    with resumable(state_file(output)), _training_bar(settings["steps"]) as on_step:
        summary, progress = recover_checkpoint(
            checkpoint, loaded, features, Settings(**settings), output,
            ranges=ranges, force=force, device=device, threads=threads, on_step=on_step,
        )  # fmt: skip
    click.echo(_describe(progress), err=True)
    if plot is not None:
        from dflash_trt.observe.plots.picture import draw_loss

        draw_loss(progress, loaded.name, plot)
    click.echo(describe(summary), err=True)
    click.echo(output)
    before, after = progress.held_out[0][1], progress.held_out[-1][1]
    if after >= before:
        raise VerificationError(
            f"{output}: the loss on held-out sequences went from {before:.3f} to {after:.3f}: training did not help",
            hint=f"more --steps, more answers in {features.name} or a lower --learning-rate; without training:"
            f" dflash-trt quantize {draft} -o DIR --recipe {recipe}",
        )
    click.echo(f"next: {build_command(output, target)}", err=True)


def _describe(progress: Progress) -> str:
    """'1000 steps: loss on held-out sequences 1.234 -> 1.012; the draft as given, not quantised: 1.050'."""
    before, after = progress.held_out[0][1], progress.held_out[-1][1]
    return (
        f"{progress.step} steps: loss on held-out sequences {before:.3f} -> {after:.3f};"
        f" the draft as given, not quantised: {progress.dense_held_out:.3f}"
    )


@contextmanager
def _training_bar(steps: int) -> Iterator[Callable[[Progress], None]]:
    """A bar with loss and time left, on a terminal; elsewhere a line at once, and then every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    is_terminal, due = sys.stderr.isatty(), 0.0
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=steps)

        def on_step(progress: Progress) -> None:
            nonlocal due
            is_first = not bar.tasks[task].fields
            if is_first and progress.step:
                click.echo(f"resuming after step {progress.step} of {steps}", err=True)
                bar.reset(task, completed=progress.step)
            loss = f"loss {progress.losses[-1]:.3f}" if progress.losses else ""
            bar.update(task, completed=progress.step, description=loss, has_begun=True)
            if not is_terminal and time.monotonic() >= due:
                due = time.monotonic() + SECONDS_BETWEEN_LINES
                click.echo(f"training: {progress.step}/{steps} {loss}".rstrip(), err=True)

        yield on_step
