# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_directory, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import check_pair, read_target
from dflash_trt.cli.output import human_bytes

if TYPE_CHECKING:
    from dflash_trt.quantize.convert import Summary


@click.command(short_help="Write a quantised copy of a draft checkpoint.")
@click.argument("draft")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Checkpoint directory to write.")
@click.option("--recipe", required=True, help="Name of a recipe, or a YAML file; +fp8-kv behind it adds that.")
@click.option("--target", help="Target checkpoint that the draft is checked against.")
@click.option(
    "--calibration",
    metavar="FILE|none",
    default="none",
    show_default=True,
    help="Features that `dflash-trt capture` wrote; none: exact bounds from the weights.",
)
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, show_default=True, help="Packing threads, 0: all.")
def quantize(
    draft: str,
    output: Path,
    recipe: str,
    target: str | None,
    calibration: str,
    force: bool,
    threads: int,
) -> None:
    """Write a quantised copy of DRAFT, a checkpoint directory or Hugging Face repository id.

    Recipes: bf16, fp8, nvfp4, nvfp4-native (q, k and v dense, as TensorRT-LLM needs them), nvfp4-w4a16
    (weights only), mixed-nvfp4-fp8; RECIPE+fp8-kv adds the scales of an FP8 context cache.

    \b
    Example:
      dflash-trt quantize z-lab/gpt-oss-120b-DFlash -o draft-nvfp4 --recipe nvfp4
    """
    checkpoint = read_draft(checkpoint_directory(draft))
    if target is not None:
        partner = read_target(configuration_directory(target))
        check_pair(checkpoint.spec, partner.spec, draft_name=draft, target_name=target)
    write_quantized(checkpoint, recipe, calibration, output, force=force, threads=threads)
    click.echo(output)


def write_quantized(
    draft: DraftCheckpoint, recipe: str, calibration: str, output: Path, *, force: bool = False, threads: int = 0
) -> None:
    """Quantises `draft` as the options of that name say, and tells on stderr what became of its tensors."""
    from dflash_trt.quantize.convert import quantize_checkpoint
    from dflash_trt.quantize.recipe import load_recipe

    chosen = load_recipe(recipe)
    ranges = None
    if calibration != "none":
        if not chosen.needs_ranges(draft.spec.linear_modules()):
            raise click.UsageError(f"--recipe {recipe} quantises weights only: it has no use for --calibration")
        from dflash_trt.quantize.calibrate import activation_ranges

        ranges = activation_ranges(draft, Path(calibration))
    summary = quantize_checkpoint(draft, chosen, output, ranges=ranges, force=force, threads=threads)
    click.echo(_describe(summary), err=True)


def _describe(summary: Summary) -> str:
    """'15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868 KiB -> 340 KiB'."""
    dense = {"dense": summary.dense_layers} if summary.dense_layers else {}
    counts = ", ".join(f"{count} {kind}" for kind, count in (summary.layers | dense).items())
    total = sum(summary.layers.values()) + summary.dense_layers
    return (
        f"{total} linear layers: {counts}; {summary.copied_tensors} other tensors copied unchanged;"
        f" {human_bytes(summary.source_bytes)} -> {human_bytes(summary.output_bytes)}"
    )
