# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target_checkpoint import check_pair, read_target
from dflash_trt.cli.dry_run import fitting_deployment, print_dry_run, print_plan_dry_run
from dflash_trt.cli.plan_options import PlanRequest, plan_options, plan_request
from dflash_trt.cli.quantize import write_quantized
from dflash_trt.deploy.deployment_file import DeploymentFile, deployment_path, load_deployment
from dflash_trt.deploy.resolve import UNQUANTIZED, plan_sizes
from dflash_trt.engine.manifest import MANIFEST
from dflash_trt.engine.plan import PlanOptions
from dflash_trt.errors import DFlashError
from dflash_trt.files.write import scratch_directory


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft")
@click.option("--target", help="Target checkpoint: directory or Hugging Face repository id.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option("--recipe", help="Quantise first: a recipe as for `dflash-trt quantize`.")
@click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe.")
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
@click.option("--dry-run", is_flag=True, help="Only print what would be built, the memory and trtexec's command lines.")
@click.option("--json", "as_json", is_flag=True, help="Print --dry-run as one JSON document.")
@plan_options
def build(
    draft: str,
    target: str | None,
    output: Path | None,
    recipe: str | None,
    calibration: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
    **plan_settings: Any,
) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt. It may also be a deployment, CONFIG.yaml or the
    name of one that `serve-config --list` shows: it names draft, target and recipe, and -o unless given.
    An engine directory alone, with --backend tensorrt, gets the TensorRT plans that it lacks.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
      dflash-trt build engine --backend tensorrt
    """
    if as_json and not dry_run:
        raise click.UsageError("--json is for --dry-run")
    plans = plan_request(plan_settings)
    sizes = None
    if (config := deployment_path(draft)) is not None:
        if recipe is not None:
            raise click.UsageError("--recipe is for a draft checkpoint; CONFIG.yaml names its own")
        deployment = load_deployment(config)
        output = output or Path(config.stem)
        if dry_run:
            print_dry_run(deployment, config.stem, output, plans, target=target, as_json=as_json)
            return
        draft, target = deployment.draft, target or deployment.target
        recipe = None if deployment.recipe == UNQUANTIZED else deployment.recipe
        sizes = _sizes(deployment, config.stem, draft, target, plans)
    elif plans.is_wanted and _is_engine(draft, target, output):
        if recipe is not None or calibration != "none" or force:
            raise click.UsageError("an engine only gets plans: no --recipe, no --calibration, no --force")
        if dry_run:
            print_plan_dry_run(Path(draft), plans, as_json=as_json)
            return
        _add_plans(Path(draft), plans)
        click.echo(draft)
        return
    elif dry_run:
        raise click.UsageError("--dry-run is for CONFIG.yaml, or with --backend tensorrt for an engine directory")
    if target is None:  # only CONFIG.yaml can stand in for these two
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if output is None:
        raise click.MissingParameter(param_hint="'-o' / '--output'", param_type="option")
    if calibration != "none" and recipe is None:
        raise click.UsageError("--calibration is for a recipe, found none")
    _build(draft, target, output, recipe, calibration, force, plans, sizes)
    click.echo(output)


def _is_engine(draft: str, target: str | None, output: Path | None) -> bool:
    return target is None and output is None and (Path(draft) / MANIFEST).is_file()


def _sizes(file: DeploymentFile, name: str, draft: str, target: str, plans: PlanRequest) -> PlanOptions | None:
    """What plans of a deployment are to serve, None where it has none; ConfigError where its GPU is too small."""
    directories = str(checkpoint_directory(draft)), str(checkpoint_directory(target))
    deployment = fitting_deployment(file, name, draft=directories[0], target=directories[1])
    return plan_sizes(deployment) if plans.is_wanted or file.mode == "engine" else None


def _build(
    draft: str,
    target: str,
    output: Path,
    recipe: str | None,
    calibration: str,
    force: bool,
    plans: PlanRequest,
    sizes: PlanOptions | None,
) -> None:
    source = read_draft(checkpoint_directory(draft))
    partner = read_target(checkpoint_directory(target))
    check_pair(source.spec, partner.spec, draft_name=draft, target_name=target)

    from dflash_trt.builder.engine_directory import build_engine, describe_source

    with scratch_directory(output) as scratch:
        checkpoint = source
        if recipe is not None:
            write_quantized(source, recipe, calibration, scratch)
            checkpoint = read_draft(scratch)
        build_engine(
            checkpoint,
            partner,
            output,
            source=describe_source(source, draft, recipe),
            force=force,
            plan_options=sizes,
            keep_plans=plans.is_wanted,
        )
    if plans.is_wanted:
        _add_plans(output, plans)
    elif sizes is not None:
        click.echo(f"without plans; on the GPU machine: dflash-trt build {output} --backend tensorrt", err=True)


def _add_plans(engine: Path, plans: PlanRequest) -> None:
    """Raises what stops it, and says that the engine is complete without plans."""
    from dflash_trt.builder.tensorrt.add_plans import add_plans
    from dflash_trt.engine.manifest import read_manifest

    options = plans.options(read_manifest(engine).plan_options)
    try:
        add_plans(engine, options, plans.timing_cache)
    except DFlashError as error:
        next_command = f"dflash-trt build {engine} --backend tensorrt"
        hint = f"{error.hint}; then: {next_command}" if error.hint else next_command
        raise type(error)(
            f"{error.message}\n{engine} is complete for ONNX Runtime, without new plans", hint=hint
        ) from None
