# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize --recover`: the options, the progress bar and the picture of the training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.files.picture import PICTURE
from dflash_trt.files.write import check_replaceable

if TYPE_CHECKING:
    from dflash_trt.quantize.convert import Summary
    from dflash_trt.quantize.ranges import Ranges
    from dflash_trt.quantize.recipe import Recipe
    from dflash_trt.quantize.recovery.training_state import Progress

Command = Callable[..., None]
OPTIONS = (
    click.option(
        "--recover",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Train the draft, quantised as it will be, on features that `dflash-trt capture` wrote.",
    ),
    click.option("--steps", type=click.IntRange(min=1), help="Steps of --recover.  [default: 1000]"),
    click.option("--seed", type=click.IntRange(min=0), help="Of what --recover or --search draws.  [default: 0]"),
    click.option(
        "--learning-rate", type=click.FloatRange(min=0, min_open=True), help="Of --recover.  [default: 0.0003]"
    ),
    click.option(
        "--distillation",
        metavar="SHARE",
        type=click.FloatRange(0, 1),
        help="Share of the loss that is the divergence from the draft as given, the rest is the target's own tokens."
        "  [default: 0.5]",
    ),
    click.option(
        "--plot", metavar="FILE", type=click.Path(path_type=Path), help="Draw the loss of --recover as a PNG."
    ),
)
DEFAULT_STEPS = 1000


def recovery_options(command: Command) -> Command:
    """Adds the options of --recover to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check_recovery(recover: Path | None, plot: Path | None, others: dict[str, object]) -> None:
    """Raises UsageError for options that do not go together, before any work."""
    given = [name for name, value in (others | {"--plot": plot}).items() if value is not None]
    if recover is None:
        if given:
            raise click.UsageError(f"{given[0]} needs --recover FILE")
        return
    if plot is not None:
        if plot.suffix != ".png" or not plot.parent.is_dir():
            raise click.UsageError(f"--plot: expected a .png file in an existing directory, found {plot}")
        check_replaceable(plot, PICTURE, force=True)
        import matplotlib  # noqa: F401 - what is missing is said before the work, not after it


def recover_draft(
    draft: DraftCheckpoint,
    recipe: Recipe,
    features: Path,
    output: Path,
    *,
    options: dict[str, int | float],
    plot: Path | None,
    ranges: Ranges | None,
    force: bool,
    threads: int,
) -> Summary:
    """Trains and packs, with a progress bar; `options` are those of `Settings` that were given."""
    from dflash_trt.quantize.recovery.recover import Recovery, recover_checkpoint
    from dflash_trt.quantize.recovery.training import Settings
    from dflash_trt.quantize.recovery.training_state import state_file

    settings = Settings(**({"steps": DEFAULT_STEPS} | options))  # type: ignore[arg-type]
    recovery = Recovery(features=features, settings=settings)
    try:
        with _progress(settings.steps) as on_step:
            summary, progress = recover_checkpoint(
                draft, recipe, recovery, output, ranges=ranges, force=force, threads=threads, on_step=on_step
            )
    except KeyboardInterrupt:
        if (state := state_file(output)).exists():
            click.echo(f"interrupted: {state} holds the training so far, the same command goes on", err=True)
        raise
    click.echo(_describe(progress), err=True)
    if plot is not None:
        from dflash_trt.cli.recovery_plot import draw

        draw(progress, recipe.name, plot)
    return summary


def _describe(progress: Progress) -> str:
    """'1000 steps: loss on held-out sequences 1.234 -> 1.012; the draft as given, not quantised: 1.050'."""
    before, after = progress.held_out[0][1], progress.held_out[-1][1]
    return (
        f"{progress.step} steps: loss on held-out sequences {before:.3f} -> {after:.3f};"
        f" the draft as given, not quantised: {progress.dense_held_out:.3f}"
    )


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[Progress], None]]:
    """A bar with loss and time left, on a terminal; elsewhere a line for where a resumed training starts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("recovering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=steps)

        def on_step(progress: Progress) -> None:
            first = not bar.tasks[task].fields
            if first and progress.step:
                click.echo(f"going on after step {progress.step} of {steps}", err=True)
                bar.reset(task, completed=progress.step)
            loss = f"loss {progress.losses[-1]:.3f}" if progress.losses else ""
            bar.update(task, completed=progress.step, description=loss, seen=True)

        yield on_step
