# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import D2T, HEAD
from dflash_trt.checkpoint.source import checkpoint_directory, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, read_pair
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.cli.build_dry_run import print_dry_run, print_plan_dry_run
from dflash_trt.cli.completion import DRAFT_OR_DEPLOYMENT, RECIPE, TARGET
from dflash_trt.cli.options import PATH, describe, options, parsed, recipe_and_ranges, refuse_given, say_dequantised
from dflash_trt.cli.output import human_bytes
from dflash_trt.deploy.catalog import trained_for
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.deployment_path import deployment_path
from dflash_trt.deploy.dry_run import fitting_deployment
from dflash_trt.deploy.resolve import UNQUANTIZED
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, plan_sizes
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.compile import TimingCache
from dflash_trt.engine.plans.machine import parse_gpus
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.signatures import not_shared
from dflash_trt.errors import DFlashError
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from dflash_trt.engine.engine_directory import BuildOptions
    from dflash_trt.engine.plans.tensorrt_api import RuntimeName
    from dflash_trt.engine.proposal_head import HeadChoice


DEFAULTS = PlanOptions()
PLAN_SETTINGS = [name for name in PlanOptions.__struct_fields__ if name != "runtime"]
NOT_RTX = "is for --backend tensorrt; TensorRT-RTX builds for a list of GPUs and chooses kernels where a plan runs"
BACKENDS: dict[str, RuntimeName] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
SIZE = click.IntRange(1, 2**31 - 1)  # slots, lengths and positions are INT32 in both graphs


def _head(text: str) -> HeadChoice | None:
    """Parses --head; loads the builder only where the draft gets a head of its own."""
    if text == "target":
        return None
    from dflash_trt.engine.proposal_head import parse_head

    return parse_head(text)


def _workspace(context: click.Context, parameter: click.Parameter, gib: float | None) -> int | None:
    """--workspace-gib in bytes."""
    if gib is not None and not math.isfinite(gib):
        raise click.UsageError(f"--workspace-gib: expected a finite number, found {gib}")
    return None if gib is None else int(gib * 2**30)


@click.command(short_help="Write an engine directory from a draft checkpoint.")
@click.argument("draft", type=DRAFT_OR_DEPLOYMENT, required=False)
@options(
    click.option("--target", type=TARGET, help="Target checkpoint: directory or Hugging Face repository id."),
    click.option("-o", "--output", type=PATH, help="Engine directory to write."),
    click.option("--plans-for", metavar="ENGINE", type=PATH,
                 help="In place of DRAFT: build the TensorRT plans that this engine directory lacks."),
    click.option("--recipe", type=RECIPE, help="Quantise first: a recipe as for `dflash-trt quantize`."),
    click.option("--calibration", metavar="FILE|none", default="none", show_default=True, help="For --recipe."),
    click.option("--head", metavar="HEAD", default="target", show_default=True, callback=parsed(_head),
                 help="What proposes tokens: target, or a copy of its lm_head: fp8, nvfp4, trim:N, trim:N:fp8,"
                 " trim:N:nvfp4."),
    click.option("--head-tokens", metavar="FILE", type=PATH,
                 help="For trim:N: features that `dflash-trt capture` wrote; their answers' most frequent tokens are"
                 " kept."),
    click.option("--tp", type=click.IntRange(min=1), metavar="N",
                 help="For TensorRT-LLM: number of ranks that share the drafter's heads and MLPs. Default: 1, every"
                 " rank runs the whole drafter."),
    click.option("--force", is_flag=True, help="Replace an existing output directory."),
    click.option("--dry-run", is_flag=True,
                 help="Only print what would be built, the memory and trtexec's command lines."),
    click.option("--json", "as_json", is_flag=True, help="Print --dry-run as one JSON document."),
    click.option("--backend", type=click.Choice(["onnx", *BACKENDS]), default="onnx", show_default=True,
                 help="tensorrt: plans for this machine's GPU as well; tensorrt-rtx: by TensorRT-RTX, for --gpu or this"
                 " machine's."),
    click.option("--gpu", "compute_capabilities", metavar="GPU,...", callback=parsed(parse_gpus),
                 help="Plans by TensorRT-RTX, which builds on any machine: sm80, sm86, sm89, sm120, sm121, or names"
                 " such as a100, rtx4090, rtx5090, gb10."),
    click.option("--max-batch-size", type=SIZE,
                 help="Blocks of one pass and slots of the context cache;"
                 f" {DEFAULTS.max_batch_size} unless CONFIG.yaml says otherwise."),
    click.option("--max-seq-len", type=SIZE,
                 help=f"Context rows per slot; {DEFAULTS.max_seq_len} unless CONFIG.yaml says otherwise."),
    click.option("--max-num-tokens", type=SIZE,
                 help=f"Context rows per injection; {DEFAULTS.max_num_tokens} unless CONFIG.yaml says otherwise."),
    click.option("--workspace-gib", "workspace_bytes", type=click.FloatRange(min=0, min_open=True), callback=_workspace,
                 help=f"Scratch memory of TensorRT's builder; {DEFAULTS.workspace_bytes / 2**30:g} unless given."),
    click.option("--hardware-compatibility", type=click.Choice(["none", "same_compute_capability", "ampere_plus"]),
                 help="none: plans for this GPU model alone, the fastest."),
    click.option("--version-compatible/--no-version-compatible", default=None,
                 help="Plans for later TensorRT versions of this major, too; the plugin is embedded."),
    click.option("--timing-cache", type=PATH, help="File that keeps what TensorRT measured."),
    click.option("--reproducible", is_flag=True, help="Measure nothing: every kernel comes from --timing-cache."),
)  # fmt: skip
def build(draft: str | None, plans_for: Path | None, dry_run: bool, as_json: bool, **settings: Any) -> None:
    """Write an engine directory from DRAFT, a checkpoint directory or Hugging Face repository id.

    DRAFT may be quantised, by `dflash-trt quantize` or by modelopt; weights of compressed-tensors and GGUF files are
    dequantised to BF16, and a --recipe applies to that. It may also be a deployment, CONFIG.yaml or the
    name of one that `serve-config --list` shows: it names draft, target and recipe, and -o unless given.
    TensorRT builds plans on the GPU machine: at once with --backend tensorrt, or later with --plans-for. For RTX GPUs,
    A100, L40S and GB10, TensorRT-RTX builds them on any machine: --gpu.

    \b
    Example:
      dflash-trt build z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b -o engine --recipe nvfp4
      dflash-trt build --plans-for engine
      dflash-trt build z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B -o engine --recipe fp8 --gpu rtx5090
    """
    changes = {name: value for name in PLAN_SETTINGS if (value := settings.pop(name)) is not None}
    runtime = BACKENDS.get(settings.pop("backend")) or ("tensorrt_rtx" if "compute_capabilities" in changes else None)
    if runtime is not None:
        changes["runtime"] = runtime
    has_plans = runtime is not None or plans_for is not None
    timing_cache, reproducible = settings.pop("timing_cache"), settings.pop("reproducible")
    if as_json and not dry_run:
        raise click.UsageError("--json is for --dry-run")
    if (draft is None) == (plans_for is None):
        raise click.UsageError("expected either DRAFT or --plans-for ENGINE")
    if not has_plans:
        refuse_given((*PLAN_SETTINGS, "timing_cache", "reproducible"), "is for --backend tensorrt")
    if runtime == "tensorrt":
        refuse_given(
            ("compute_capabilities",), "is for --backend tensorrt-rtx; TensorRT builds for the GPU that is here"
        )
    elif runtime == "tensorrt_rtx":
        refuse_given(("hardware_compatibility", "version_compatible", "timing_cache", "reproducible"), NOT_RTX)
    if reproducible and timing_cache is None:
        raise click.UsageError("--reproducible needs --timing-cache")
    cache = None if timing_cache is None else TimingCache(file=timing_cache, reproducible=reproducible)
    _check_head(settings["head"], settings["head_tokens"])
    if plans_for is not None:
        refuse_given(settings, "cannot be used with --plans-for")
        if dry_run:
            print_plan_dry_run(plans_for, changes, cache, as_json=as_json)
            return
        engine = plans_for
    else:
        config = deployment_path(str(draft))
        if dry_run:
            if config is None:
                raise click.UsageError("--dry-run is for CONFIG.yaml or --plans-for ENGINE")
            _refuse_for_deployment()
            output, target = settings["output"] or Path(config.stem), settings["target"]
            print_dry_run(config, output, changes if has_plans else None, cache, target=target, as_json=as_json)
            return
        if config is None:
            build_options = checkpoint_options(str(draft), **settings)
        else:
            build_options = deployment_options(config, has_plans=has_plans, **settings)
        _write_engine(build_options)
        engine = build_options.output
        if build_options.plan_options is not None and not has_plans:
            click.echo(f"no plans yet; on the GPU machine: dflash-trt build --plans-for {quoted(engine)}", err=True)
    if has_plans:
        _add_plans(engine, changes, cache)
    click.echo(
        f"next: dflash-trt verify {quoted(engine)} --prompts FILE; then: dflash-trt serve {quoted(engine)}", err=True
    )
    click.echo(engine)


def checkpoint_options(
    draft: str, *, target: str | None, output: Path | None, recipe: str | None, calibration: str,
    head: HeadChoice | None, **settings: Any,
) -> BuildOptions:  # fmt: skip
    """Options for a draft checkpoint and a target that it fits."""
    if target is None:
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if output is None:
        raise click.MissingParameter(param_hint="'-o' / '--output'", param_type="option")
    _check_calibration(recipe, calibration)
    find = configuration_directory if head is None else checkpoint_directory
    pair = read_pair(draft, target, find)
    if (usual_target := trained_for(draft, target)) is not None:
        click.echo(f"warning: {draft} was trained for {usual_target}, not for {target}", err=True)
    return _options(draft, target, pair, recipe, calibration, output=output, head=head, **settings)


def deployment_options(
    config: Path, *, target: str | None, output: Path | None, recipe: str | None, calibration: str, has_plans: bool,
    **settings: Any,
) -> BuildOptions:  # fmt: skip
    """Options for the draft, target and recipe that CONFIG.yaml names, where they fit its GPUs."""
    _refuse_for_deployment()
    file, name = load_deployment(config), config.stem
    recipe, target = None if file.recipe == UNQUANTIZED else file.recipe, target or file.target
    _check_calibration(recipe, calibration)
    directories = checkpoint_directory(file.draft), configuration_directory(target)
    deployment = fitting_deployment(file, name, draft=str(directories[0]), target=str(directories[1]))
    assert deployment.target_sizes is not None, "both are directories, and were read"
    source, partner = deployment.draft_sizes.checkpoint, deployment.target_sizes.checkpoint
    assert source is not None
    assert partner is not None
    is_engine_mode = file.mode == "engine"
    if is_engine_mode:
        _print_ranks(deployment)
        settings["tp"] = deployment.num_ranks
    served = plan_sizes(deployment) if has_plans or is_engine_mode else None
    settings |= {"output": output or Path(name), "plan_options": served}
    return _options(file.draft, target, (source, partner), recipe, calibration, **settings)


def _options(
    draft: str, target: str, pair: tuple[DraftCheckpoint, TargetCheckpoint], recipe: str | None, calibration: str, *,
    tp: int | None, head: HeadChoice | None, head_tokens: Path | None, **settings: Any,
) -> BuildOptions:  # fmt: skip
    from dflash_trt.engine.engine_directory import BuildOptions

    source, partner = pair
    say_dequantised(source, draft)
    if recipe is not None:
        settings["recipe"], settings["ranges"] = recipe_and_ranges(source, recipe, calibration)
    if head is not None and head.num_tokens is not None and head_tokens is not None:
        from dflash_trt.runtime.measure.features import captured_tokens, kept_shares

        token_ids = captured_tokens(source.spec, head_tokens, partner.directory, head.num_tokens)
        shares = kept_shares(source.spec, head_tokens, token_ids)
        listed = ", ".join(f"{language or 'all'} {share:.1%}" for language, share in shares.items())
        click.echo(f"share of the captured answers' tokens that it can propose: {listed}", err=True)
        settings["head_tokens"] = token_ids
    return BuildOptions(
        draft=source, draft_name=draft, target=partner, target_name=target, head=head, num_ranks=tp or 1, **settings
    )


def _print_ranks(deployment: ResolvedDeployment) -> None:
    """Bytes of the drafter on each GPU where it is whole on every rank, and where the ranks share it."""
    draft, num_ranks = deployment.draft_sizes, deployment.tensor_parallel
    if num_ranks == 1 or deployment.enable_attention_dp or not_shared(draft.spec, num_ranks):
        return
    parts = []
    for count, place in ((1, "whole"), (num_ranks, f"shared by {num_ranks}")):
        weights = human_bytes(draft.weight_bytes(deployment.algorithms, count))
        row = draft.spec.context_bytes_per_token(fp8=False, num_ranks=count)
        is_deployed = " (as deployed)" * (count == deployment.num_ranks)
        parts.append(f"{place}{is_deployed}: weights {weights}, context {human_bytes(deployment.max_seq_len * row)}")
    request = f"a request of {deployment.max_seq_len} tokens"
    click.echo(f"drafter on each of {num_ranks} GPUs, with the context of {request}: {'; '.join(parts)}", err=True)


def _refuse_for_deployment() -> None:
    refuse_given(("recipe", "tp", "head"), "is for a draft checkpoint; CONFIG.yaml says itself what it serves")


def _check_calibration(recipe: str | None, calibration: str) -> None:
    if calibration != "none" and recipe is None:
        raise click.UsageError("--calibration needs a recipe")


def _check_head(head: HeadChoice | None, head_tokens: Path | None) -> None:
    is_trimmed = head is not None and head.num_tokens is not None
    if is_trimmed and head_tokens is None:
        raise click.UsageError("--head trim:N needs --head-tokens FILE, whose answers say which tokens are frequent")
    if head_tokens is not None and not is_trimmed:
        raise click.UsageError("--head-tokens is for --head trim:N")


def _write_engine(options: BuildOptions) -> None:
    """Writes the engine of a pair that fits, and says on stderr what became of the draft."""
    from dflash_trt.engine.engine_directory import build_engine
    from dflash_trt.quantize.convert import summary

    build_engine(options)
    draft, target = (click.format_filename(str(name)) for name in (options.draft_name, options.target_name))
    click.echo(f"{draft} fits target {target}", err=True)
    if options.recipe is not None:
        click.echo(describe(summary(options.draft, options.recipe)), err=True)
    if options.head is not None:
        vocab_size = options.target.spec.vocab_size
        weights = read_weights(options.output).values()
        size = sum(tensor.num_bytes for tensor in weights if tensor.name.startswith((f"{HEAD}.", D2T)))
        num_tokens = options.head.num_tokens or vocab_size
        click.echo(f"own head: {num_tokens} of {vocab_size} tokens, {human_bytes(size)}", err=True)


def _add_plans(engine: Path, changes: dict[str, Any], timing_cache: TimingCache | None) -> None:
    """Adds plans; an error also says that the engine is complete without them."""
    from dflash_trt.engine.plans.add_plans import add_plans

    plan_options = (read_manifest(engine).plan_options or DEFAULTS).changed(**changes)
    try:
        add_plans(engine, plan_options, timing_cache)
    except DFlashError as error:
        next_command = f"dflash-trt build --plans-for {quoted(engine)}"
        hint = f"{error.hint}; then: {next_command}" if error.hint else next_command
        raise type(error)(
            f"{error.message}\n{engine} is complete for ONNX Runtime, without new plans", hint=hint
        ) from None
