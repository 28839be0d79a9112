# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.completion import DRAFT
from dflash_trt.cli.options import PATH, force_option, json_option
from dflash_trt.cli.output import print_written
from dflash_trt.cli.recipes import (
    build_command,
    calibration_option,
    describe,
    read_checked_draft,
    recipe_and_ranges,
    recipe_option,
    target_option,
)
from dflash_trt.cli.settings import runtime_options


@click.command(short_help="Write a quantised copy of a draft checkpoint.")
@click.argument("draft", type=DRAFT)
@click.option("-o", "--output", required=True, type=PATH, help="Checkpoint directory to write.")
@recipe_option
@target_option
@calibration_option
@click.option("--like-modelopt", is_flag=True,
              help="Write Model Optimizer's bytes: FP8 quotients rounded to the weights' type.")  # fmt: skip
@runtime_options("device")
@force_option
@json_option
@click.option("--threads", type=click.IntRange(0, 1024), default=0, show_default=True, help="Threads; 0: all.")
def quantize(
    draft: str,
    output: Path,
    recipe: str,
    target: str | None,
    calibration: str,
    like_modelopt: bool,
    device: str,
    force: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Write a quantised copy of DRAFT, a checkpoint directory or Hugging Face repository id.

    Recipes: bf16, fp8, nvfp4, nvfp4-native (q, k and v dense, as TensorRT-LLM needs them), nvfp4-w4a16
    and int4-w4a16 (weights only), mixed-nvfp4-fp8; RECIPE+fp8-kv adds the scales of an FP8 context cache.
    `dflash-trt search` finds a recipe for a budget, `dflash-trt recover` trains the draft before packing.

    \b
    Example:
      dflash-trt quantize z-lab/gpt-oss-120b-DFlash -o draft-nvfp4 --recipe nvfp4
    """
    checkpoint = read_checked_draft(draft, target)
    loaded, ranges = recipe_and_ranges(checkpoint, recipe, calibration, device)
    from dflash_trt.quantize.convert import quantize_checkpoint

    summary = quantize_checkpoint(
        checkpoint, loaded, output, ranges=ranges, force=force, threads=threads, like_modelopt=like_modelopt
    )
    print_written(
        "quantize", output, describe(summary), msgspec.structs.asdict(summary),
        next_step=build_command(output, target), as_json=as_json,
    )  # fmt: skip
