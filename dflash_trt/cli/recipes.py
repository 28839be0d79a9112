# SPDX-License-Identifier: Apache-2.0
"""Drafts and recipes: options of the commands that quantise, and what these commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.cli.completion import RECIPE, TARGET
from dflash_trt.cli.options import PATH
from dflash_trt.cli.output import human_bytes
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from dflash_trt.quantize.bounds import Ranges
    from dflash_trt.quantize.convert import Summary
    from dflash_trt.quantize.recipe import Recipe

recipe_option = click.option(
    "--recipe",
    type=RECIPE,
    required=True,
    help="Name of a recipe, or a YAML file; append +fp8-kv for an FP8 context cache.",
)
target_option = click.option("--target", type=TARGET, help="Target checkpoint that the draft is checked against.")
calibration_option = click.option(
    "--calibration", metavar="FILE|none", default="none", show_default=True,
    help="Features that `dflash-trt capture` wrote; none: exact bounds from the weights.",
)  # fmt: skip
features_option = click.option(
    "--features", required=True, metavar="FILE", type=PATH, help="Answers that `dflash-trt capture` wrote."
)


def read_checked_draft(draft: str, target: str | None) -> DraftCheckpoint:
    """The checkpoint; raises CheckpointError where it does not fit `target`."""
    checkpoint = read_draft(checkpoint_directory(draft)) if target is None else read_pair(draft, target)[0]
    say_dequantised(checkpoint, draft)
    return checkpoint


def say_dequantised(checkpoint: DraftCheckpoint, name: str) -> None:
    """Says on stderr what weights that another quantiser packed are read as."""
    if checkpoint.stored_as is not None:
        click.echo(f"{click.format_filename(name)}: {checkpoint.stored_as}", err=True)


def recipe_and_ranges(
    draft: DraftCheckpoint, recipe: str, calibration: str, device: str = "cpu"
) -> tuple[Recipe, Ranges | None]:
    """Loads --recipe and --calibration, which runs on `device`; ranges are None for bounds from the weights."""
    from dflash_trt.quantize.recipe import load_recipe

    loaded = load_recipe(recipe)
    if calibration == "none":
        return loaded, None
    if not loaded.needs_ranges:
        raise click.UsageError(f"--recipe {recipe} quantises weights only and needs no --calibration")
    from dflash_trt.api.runtime_options import choose_device
    from dflash_trt.runtime.measure.calibrate import activation_ranges

    return loaded, activation_ranges(draft, Path(calibration), choose_device(device))


def build_command(draft: Path, target: str | None) -> str:
    """The command that makes an engine of a checkpoint that was written."""
    return f"dflash-trt build {quoted(draft)} --target {quoted(Path(target or 'TARGET'))} -o engine"


def describe(summary: Summary) -> str:
    """'15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868 KiB -> 340 KiB'."""
    dense = {"dense": summary.dense_layers} if summary.dense_layers else {}
    counts = ", ".join(f"{count} {kind}" for kind, count in (summary.layers | dense).items())
    total = sum(summary.layers.values()) + summary.dense_layers
    return (
        f"{total} linear layers: {counts}; {summary.copied_tensors} other tensors copied unchanged;"
        f" {human_bytes(summary.source_bytes)} -> {human_bytes(summary.output_bytes)}"
    )
