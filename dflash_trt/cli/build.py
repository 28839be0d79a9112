# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target import check_pair, read_target
from dflash_trt.checkpoint.write import scratch_directory
from dflash_trt.cli.dry_run import print_dry_run
from dflash_trt.cli.quantize import write_quantized
from dflash_trt.config.deployment import is_config, load_deployment
from dflash_trt.serving.resolve import UNQUANTIZED


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft")
@click.option("--target", help="Target checkpoint: directory or Hugging Face repository id.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option("--recipe", help="Quantise first: a recipe as for `dflash-trt quantize`.")
@click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
@click.option("--dry-run", is_flag=True, help="For CONFIG.yaml: only print its settings, their origin and the memory.")
@click.option("--json", "as_json", is_flag=True, help="Print --dry-run as one JSON document.")
def build(
    draft: str,
    target: str | None,
    output: Path | None,
    recipe: str | None,
    calibration: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt. It may also be a deployment file, CONFIG.yaml,
    which names draft, target and recipe; the engine directory is then called like the file unless -o says otherwise.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
    """
    if as_json and not dry_run:
        raise click.UsageError("--json is for --dry-run")
    if is_config(draft):
        if recipe is not None:
            raise click.UsageError("--recipe is for a draft checkpoint; CONFIG.yaml names its own")
        config = Path(draft)
        deployment = load_deployment(config)
        if dry_run:
            print_dry_run(deployment, config.stem, target=target, as_json=as_json)
            return
        draft, target = deployment.draft, target or deployment.target
        recipe = None if deployment.recipe == UNQUANTIZED else deployment.recipe
        output = output or Path(config.stem)
    elif dry_run:
        raise click.UsageError("--dry-run is for CONFIG.yaml")
    if target is None:  # only CONFIG.yaml can stand in for these two
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if output is None:
        raise click.MissingParameter(param_hint="'-o' / '--output'", param_type="option")
    _build(draft, target, output, recipe, calibration, force)
    click.echo(output)


def _build(draft: str, target: str, output: Path, recipe: str | None, calibration: str, force: bool) -> None:
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
