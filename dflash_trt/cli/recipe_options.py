# SPDX-License-Identifier: Apache-2.0
"""Options that name a recipe, its calibration and a checked draft; a summary of quantised tensors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target_checkpoint import read_pair
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
force_option = click.option("--force", is_flag=True, help="Replace an existing output directory.")
features_option = click.option(
    "--features", required=True, metavar="FILE", type=PATH, help="Answers that `dflash-trt capture` wrote."
)


def read_checked_draft(draft: str, target: str | None) -> DraftCheckpoint:
    """The checkpoint; raises CheckpointError where it does not fit `target`."""
    return read_draft(checkpoint_directory(draft)) if target is None else read_pair(draft, target)[0]


def recipe_and_ranges(draft: DraftCheckpoint, recipe: str, calibration: str) -> tuple[Recipe, Ranges | None]:
    """Loads --recipe and --calibration; ranges are None for bounds from the weights."""
    from dflash_trt.quantize.recipe import load_recipe

    loaded = load_recipe(recipe)
    if calibration == "none":
        return loaded, None
    if not loaded.needs_ranges(draft.spec.linear_modules()):
        raise click.UsageError(f"--recipe {recipe} quantises weights only and needs no --calibration")
    from dflash_trt.runtime.measure.calibrate import activation_ranges

    return loaded, activation_ranges(draft, Path(calibration))


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
