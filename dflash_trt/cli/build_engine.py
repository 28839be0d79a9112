# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build` of a draft checkpoint, or of the draft that a deployment names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import D2T, HEAD
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.checkpoint.source import checkpoint_directory, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.cli.build_request import BuildRequest, check_calibration, refuse_for_deployment
from dflash_trt.cli.output import human_bytes
from dflash_trt.cli.recipes import describe, recipe_and_ranges, say_dequantised
from dflash_trt.deploy.deployment_file import load_deployment
from dflash_trt.deploy.dry_run import fitting_deployment
from dflash_trt.deploy.resolve import UNQUANTIZED
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, plan_sizes
from dflash_trt.deploy.trained_target import pair_warnings, shapes_fit, trained_target
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.shards import not_shared
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def build_checkpoint(request: BuildRequest) -> Path:
    """Writes the engine of a draft checkpoint and a target that it fits; returns its directory."""
    draft, target = request.draft, request.target
    assert draft is not None, "check_usage refuses it"
    if target is None:
        raise click.MissingParameter(param_hint="'--target'", param_type="option")
    if request.output is None:
        raise click.MissingParameter(param_hint="'-o' / '--output'", param_type="option")
    check_calibration(request.recipe, request)
    find_target = configuration_directory if request.head is None else checkpoint_directory
    pair = read_pair(draft, target, find_target)
    return _write(request, draft, target, pair, recipe=request.recipe, output=request.output, num_ranks=request.tp or 1)


def build_deployment(config: Path, request: BuildRequest) -> Path:
    """Writes the engine for the draft, target and recipe of CONFIG.yaml, where they fit its GPUs."""
    refuse_for_deployment()
    file, name = load_deployment(config), config.stem
    recipe, target = None if file.recipe == UNQUANTIZED else file.recipe, request.target or file.target
    check_calibration(recipe, request)
    directories = checkpoint_directory(file.draft), configuration_directory(target)
    deployment = fitting_deployment(file, name, draft=str(directories[0]), target=str(directories[1]))
    assert deployment.target_sizes is not None, "both are directories, and were read"
    source, partner = deployment.draft_sizes.checkpoint, deployment.target_sizes.checkpoint
    assert source is not None
    assert partner is not None
    is_engine_mode = file.mode == "engine"
    if is_engine_mode:
        _print_ranks(deployment)
    return _write(
        request, file.draft, target, (source, partner), recipe=recipe, output=request.output or Path(name),
        num_ranks=deployment.num_ranks if is_engine_mode else 1,
        plan_options=plan_sizes(deployment) if request.has_plans or is_engine_mode else None,
    )  # fmt: skip


def _write(
    request: BuildRequest, draft: str, target: str, pair: tuple[DraftCheckpoint, TargetCheckpoint], *,
    recipe: str | None, output: Path, num_ranks: int, plan_options: PlanOptions | None = None,
) -> Path:  # fmt: skip
    """Writes the engine of a pair that fits, and says on stderr what became of the draft."""
    from dflash_trt.engine.engine_directory import BuildOptions, build_engine
    from dflash_trt.quantize.convert import summary

    source, partner = pair
    say_dequantised(source, draft)
    loaded, ranges = (None, None) if recipe is None else recipe_and_ranges(source, recipe, request.calibration)
    manifest = build_engine(
        BuildOptions(
            draft=source, draft_name=draft, target=partner, target_name=target, output=output, force=request.force,
            recipe=loaded, ranges=ranges, head=request.head, head_tokens=_head_tokens(request, source, partner),
            num_ranks=num_ranks, plan_options=plan_options,
        )
    )  # fmt: skip
    names = click.format_filename(draft), click.format_filename(target)
    trained = trained_target(draft, source.config)
    click.echo(shapes_fit(*names, trained), err=True)
    for warning in pair_warnings(names[0], source.spec, trained, names[1], partner):
        click.echo(f"warning: {warning}", err=True)
    if recipe is not None:
        click.echo(describe(summary(source, manifest.quantization)), err=True)
    if request.head is not None:
        vocab_size = partner.spec.vocab_size
        weights = read_weights(output).values()
        size = sum(tensor.num_bytes for tensor in weights if tensor.name.startswith((f"{HEAD}.", D2T)))
        num_tokens = request.head.num_tokens or vocab_size
        click.echo(f"own head: {num_tokens} of {vocab_size} tokens, {human_bytes(size)}", err=True)
    if plan_options is not None and not request.has_plans:
        click.echo(f"no plans yet; on the GPU machine: dflash-trt build --plans-for {quoted(output)}", err=True)
    return output


def _head_tokens(request: BuildRequest, draft: DraftCheckpoint, target: TargetCheckpoint) -> NDArray[np.int64] | None:
    """Tokens that a trimmed head keeps; says on stderr which share of the captured answers they are."""
    if request.head is None or request.head.num_tokens is None or request.head_tokens is None:
        return None
    from dflash_trt.runtime.measure.features import captured_tokens, kept_shares

    token_ids = captured_tokens(draft.spec, request.head_tokens, target.directory, request.head.num_tokens)
    shares = kept_shares(draft.spec, request.head_tokens, token_ids)
    listed = ", ".join(f"{language or 'all'} {share:.1%}" for language, share in shares.items())
    click.echo(f"share of the captured answers' tokens that it can propose: {listed}", err=True)
    return token_ids


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
