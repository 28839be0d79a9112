# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target import read_target


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft")
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
def build(draft: str, target: str, output: Path, force: bool) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine
    """
    draft_checkpoint = read_draft(checkpoint_directory(draft))
    target_checkpoint = read_target(checkpoint_directory(target))

    from dflash_trt.build.engine import build_engine

    build_engine(draft_checkpoint, draft, target_checkpoint, target, output, force=force)
    click.echo(output)
