# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target import check_pair, read_target
from dflash_trt.checkpoint.write import scratch_directory
from dflash_trt.cli.quantize import write_quantized


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft")
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option("--recipe", help="Quantise first: a recipe as for `dflash-trt quantize`.")
@click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
def build(draft: str, target: str, output: Path, recipe: str | None, calibration: str, force: bool) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
    """
    source = read_draft(checkpoint_directory(draft))
    partner = read_target(checkpoint_directory(target))
    check_pair(source.spec, partner.spec, draft_name=draft, target_name=target)

    from dflash_trt.build.engine import build_engine, describe_source

    with scratch_directory(output) as scratch:
        checkpoint = source
        if recipe is not None:
            write_quantized(source, recipe, calibration, scratch)
            checkpoint = read_draft(scratch)
        build_engine(checkpoint, partner, output, source=describe_source(source, draft, recipe), force=force)
    click.echo(output)
