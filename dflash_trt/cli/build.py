# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.source import checkpoint_directory, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, read_pair
from dflash_trt.cli.completion import DRAFT_OR_DEPLOYMENT, RECIPE, TARGET
from dflash_trt.cli.dry_run import print_dry_run, print_plan_dry_run
from dflash_trt.cli.options import PATH, options, refuse_given
from dflash_trt.cli.output import human_bytes
from dflash_trt.cli.plan_options import PlanRequest, plan_options, plan_request
from dflash_trt.cli.recipe_options import describe, recipe_and_ranges
from dflash_trt.deploy.catalog import trained_for
from dflash_trt.deploy.deployment_file import deployment_path, load_deployment
from dflash_trt.deploy.dry_run import fitting_deployment
from dflash_trt.deploy.resolve import UNQUANTIZED, ResolvedDeployment, plan_sizes
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import ConfigError, DFlashError
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from dflash_trt.engine.build import HeadSummary
    from dflash_trt.engine.proposal_head import HeadChoice


def _head(context: click.Context, parameter: click.Parameter, text: str) -> HeadChoice | None:
    """--head, read; the builder is loaded for an own head only."""
    if text == "target":
        return None
    from dflash_trt.engine.proposal_head import parse_head

    try:
        return parse_head(text)
    except ValueError:
        raise click.BadParameter(
            f"expected target, fp8, nvfp4, trim:N, trim:N:fp8 or trim:N:nvfp4, found {text}", context, parameter
        ) from None


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft", type=DRAFT_OR_DEPLOYMENT, required=False)
@options(
    click.option("--target", type=TARGET, help="Target checkpoint: directory or Hugging Face repository id."),
    click.option("-o", "--output", type=PATH, help="Engine directory to write."),
    click.option("--plans-for", metavar="ENGINE", type=PATH,
                 help="In place of DRAFT: build the TensorRT plans that this engine directory lacks."),
    click.option("--recipe", type=RECIPE, help="Quantise first: a recipe as for `dflash-trt quantize`."),
    click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe."),
    click.option("--head", metavar="HEAD", default="target", show_default=True, callback=_head,
                 help="What proposes tokens: target, or a copy of its lm_head: fp8, nvfp4, trim:N, trim:N:fp8,"
                 " trim:N:nvfp4."),
    click.option("--head-tokens", metavar="FILE", type=PATH,
                 help="For trim:N: features that `dflash-trt capture` wrote; their answers' most frequent tokens are"
                 " kept."),
    click.option("--tp", type=click.IntRange(min=1), metavar="N",
                 help="For TensorRT-LLM: ranks that share the drafter's heads and MLPs; 1, each runs all of it, unless"
                 " given."),
    click.option("--force", is_flag=True, help="Replace an existing output directory."),
    click.option("--dry-run", is_flag=True,
                 help="Only print what would be built, the memory and trtexec's command lines."),
    click.option("--json", "as_json", is_flag=True, help="Print --dry-run as one JSON document."),
    plan_options,
)  # fmt: skip
def build(draft: str | None, plans_for: Path | None, **settings: Any) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt. It may also be a deployment, CONFIG.yaml or the
    name of one that `serve-config --list` shows: it names draft, target and recipe, and -o unless given.
    Plans are built on the GPU machine: at once with --backend tensorrt, or later with --plans-for.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
      dflash-trt build --plans-for engine
    """
    own = {name: settings.pop(name) for name in BuildRequest.__struct_fields__ if name != "plans"}
    if own["as_json"] and not own["dry_run"]:
        raise click.UsageError("--json is for --dry-run")
    if (draft is None) == (plans_for is None):
        raise click.UsageError("expected either DRAFT or --plans-for ENGINE")
    if plans_for is not None:
        settings["backend"] = "tensorrt"
    request = BuildRequest(**own, plans=plan_request(settings))
    _check_head(request)
    if plans_for is not None:
        written = build_plans(plans_for, request)
    elif (config := deployment_path(str(draft))) is not None:
        written = build_deployment(config, request)
    else:
        written = build_checkpoint(str(draft), request)
    if written is not None:
        engine = quoted(written)
        click.echo(f"next: dflash-trt verify {engine} --prompts FILE; then: dflash-trt serve {engine}", err=True)
        click.echo(written)


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True):
    target: str | None
    output: Path | None
    recipe: str | None
    calibration: str
    head: HeadChoice | None
    head_tokens: Path | None
    tp: int | None
    force: bool
    dry_run: bool
    as_json: bool
    plans: PlanRequest


def build_checkpoint(draft: str, request: BuildRequest) -> Path:
    """A draft checkpoint and its target become an engine directory, whose path is returned."""
    if request.dry_run:
        raise click.UsageError("--dry-run is for CONFIG.yaml or --plans-for ENGINE")
    if request.target is None:
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if request.output is None:
        raise click.MissingParameter(param_hint="'-o' / '--output'", param_type="option")
    _check_calibration(request)
    find = configuration_directory if request.head is None else checkpoint_directory
    source, partner = read_pair(draft, request.target, find)
    if (usual_target := trained_for(draft, request.target)) is not None:
        click.echo(f"warning: {draft} was trained for {usual_target}, not for {request.target}", err=True)
    _write_engine(draft, source, partner, request.output, request)
    return request.output


def build_deployment(config: Path, request: BuildRequest) -> Path | None:
    """The same for the draft, target and recipe that CONFIG.yaml names, where they fit its GPUs; None for --dry-run."""
    refuse_given(("recipe", "tp", "head"), "is for a draft checkpoint; CONFIG.yaml says itself what it serves")
    file, name, output = load_deployment(config), config.stem, request.output or Path(config.stem)
    if request.dry_run:
        print_dry_run(file, name, output, request.plans, target=request.target, as_json=request.as_json)
        return None
    recipe, target_name = None if file.recipe == UNQUANTIZED else file.recipe, request.target or file.target
    request = msgspec.structs.replace(request, recipe=recipe, target=target_name)
    _check_calibration(request)
    draft, target = checkpoint_directory(file.draft), configuration_directory(target_name)
    deployment = fitting_deployment(file, name, draft=str(draft), target=str(target))
    source, sizes = deployment.draft_sizes.checkpoint, deployment.target_sizes
    assert source is not None  # both are directories, and were read
    assert sizes is not None
    assert sizes.checkpoint is not None
    if file.mode == "engine":
        _print_ranks(deployment, str(target))
        request = msgspec.structs.replace(request, tp=deployment.num_ranks)
    has_plans = request.plans.is_wanted or file.mode == "engine"
    served = plan_sizes(deployment) if has_plans else None
    _write_engine(file.draft, source, sizes.checkpoint, output, request, served)
    return output


def _print_ranks(deployment: ResolvedDeployment, target: str) -> None:
    """What a drafter costs that is whole on each rank, or shared by all, and which to deploy."""
    from dflash_trt.observe.estimate.drafter_ranks import drafters_on_ranks, in_words, preferred
    from dflash_trt.observe.estimate.inputs import system

    context = deployment.max_seq_len / 2
    try:
        load = system(deployment, "trtllm", target).memory
        drafters = [] if load is None else drafters_on_ranks(load, context)
    except ConfigError as error:
        click.echo(f"ranks of the drafter: not estimated: {error.message}", err=True)
        return
    if drafters:
        click.echo(in_words(drafters, context), err=True)
        if not (best := preferred(drafters)).is_deployed:
            click.echo(f"by that estimate, set num_ranks to {best.ranks}", err=True)


def build_plans(engine: Path, request: BuildRequest) -> Path | None:
    """An engine directory gets the TensorRT plans that it lacks; None for --dry-run."""
    names = ("target", "output", "recipe", "calibration", "head", "head_tokens", "tp", "force")
    refuse_given(names, "cannot be used with --plans-for")
    if request.dry_run:
        print_plan_dry_run(engine, request.plans, as_json=request.as_json)
        return None
    _add_plans(engine, request.plans)
    return engine


def _check_calibration(request: BuildRequest) -> None:
    if request.calibration != "none" and request.recipe is None:
        raise click.UsageError("--calibration needs a recipe")


def _check_head(request: BuildRequest) -> None:
    is_trimmed = request.head is not None and request.head.num_tokens is not None
    if is_trimmed and request.head_tokens is None:
        raise click.UsageError("--head trim:N needs --head-tokens FILE, whose answers say which tokens are frequent")
    if request.head_tokens is not None and not is_trimmed:
        raise click.UsageError("--head-tokens is for --head trim:N")


def _write_engine(
    name: str, source: DraftCheckpoint, target: TargetCheckpoint, output: Path, request: BuildRequest,
    plan_options: PlanOptions | None = None,
) -> None:  # fmt: skip
    """Writes the engine of a pair that fits, and says on stderr what became of the draft.

    `name` is what the user called the draft; `plan_options` say what a deployment's plans, built now or later, serve.
    """
    from dflash_trt.engine.build import BuildJob, run_build

    recipe, ranges = None, None
    if request.recipe is not None:
        recipe, ranges = recipe_and_ranges(source, request.recipe, request.calibration)
    job = BuildJob(
        name=name, draft=source, target=target, target_name=str(request.target), recipe=recipe,
        recipe_name=request.recipe, ranges=ranges, head=request.head, head_tokens=request.head_tokens,
        plan_options=plan_options, num_ranks=request.tp or 1,
    )  # fmt: skip
    quantized, head = run_build(job, output, force=request.force, keep_plans=request.plans.is_wanted)
    click.echo(f"{click.format_filename(name)} fits target {click.format_filename(str(request.target))}", err=True)
    if quantized is not None:
        click.echo(describe(quantized), err=True)
    if head is not None:
        _print_head(head, target.spec.vocab_size)
    if request.plans.is_wanted:
        _add_plans(output, request.plans)
    elif plan_options is not None:
        click.echo(f"no plans yet; on the GPU machine: dflash-trt build --plans-for {quoted(output)}", err=True)


def _print_head(head: HeadSummary, vocab_size: int) -> None:
    if head.kept_shares:
        listed = ", ".join(f"{name or 'all'} {share:.1%}" for name, share in head.kept_shares.items())
        click.echo(f"share of the captured answers' tokens that it can propose: {listed}", err=True)
    click.echo(f"own head: {head.num_tokens} of {vocab_size} tokens, {human_bytes(head.num_bytes)}", err=True)


def _add_plans(engine: Path, plans: PlanRequest) -> None:
    """Raises what stops it, and says that the engine is complete without plans."""
    from dflash_trt.engine.manifest import read_manifest
    from dflash_trt.engine.plans.add_plans import add_plans

    plan_options = plans.options(read_manifest(engine).plan_options)
    try:
        add_plans(engine, plan_options, plans.timing_cache)
    except DFlashError as error:
        next_command = f"dflash-trt build --plans-for {quoted(engine)}"
        hint = f"{error.hint}; then: {next_command}" if error.hint else next_command
        raise type(error)(
            f"{error.message}\n{engine} is complete for ONNX Runtime, without new plans", hint=hint
        ) from None
