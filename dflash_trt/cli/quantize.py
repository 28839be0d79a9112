# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_directory, configuration_directory
from dflash_trt.checkpoint.target_checkpoint import check_pair, read_target
from dflash_trt.cli.output import human_bytes
from dflash_trt.cli.recovery import check_recovery, recover_draft, recovery_options
from dflash_trt.cli.share_option import num_bytes, share
from dflash_trt.quantize.loadable import FORMATS, LOADABLE, Runtime

if TYPE_CHECKING:
    from dflash_trt.quantize.convert import Summary
    from dflash_trt.quantize.ranges import Ranges
    from dflash_trt.quantize.recipe import Recipe

SEARCH_OPTIONS = ("max_bytes", "held_out", "loadable_by", "formats", "context_tokens", "objective", "gpu", "batch_size")
RECIPE_OPTIONS = ("threads", "recover", "steps", "learning_rate", "distillation", "plot")


@click.command(short_help="Write a quantised copy of a draft checkpoint.")
@click.argument("draft")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Checkpoint directory to write; with --search the recipe's YAML file.",
)
@click.option("--recipe", help="Name of a recipe, or a YAML file; +fp8-kv behind it adds that.")
@click.option(
    "--search",
    "features",
    metavar="FEATURES",
    type=click.Path(path_type=Path),
    help="Look for the smallest recipe on answers that `dflash-trt capture` wrote, in the place of --recipe.",
)
@click.option(
    "--max-tau-loss", metavar="SHARE", callback=share, help="What a searched recipe may lose of tau, e.g. 1%."
)
@click.option("--max-bytes", metavar="BYTES", callback=num_bytes, help="Fail where no found recipe is as small.")
@click.option(
    "--held-out",
    metavar="FEATURES",
    type=click.Path(path_type=Path),
    help="Other answers to hold out from the search; by default half of those that are searched on.",
)
@click.option(
    "--loadable-by",
    type=click.Choice(list(LOADABLE)),
    default="engine",
    show_default=True,
    help="Search among recipes that this runtime loads.",
)
@click.option(
    "--format",
    "formats",
    type=click.Choice(FORMATS),
    multiple=True,
    default=FORMATS,
    show_default=True,
    help="Search among these algorithms; W4A16_NVFP4 quantises weights only.",
)
@click.option(
    "--context-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Let the search choose an FP8 context cache, so many tokens of which count as bytes.",
)
@click.option(
    "--objective",
    type=click.Choice(["bytes", "step-time"]),
    default="bytes",
    show_default=True,
    help="What a searched recipe has little of; step-time: estimated, of the drafter's part on --gpu.",
)
@click.option("--gpu", metavar="NAME", help="For --objective step-time: a GPU of `estimate`, such as b300 or h200.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="For --objective step-time: requests at once.",
)
@click.option("--target", help="Target checkpoint that the draft is checked against.")
@click.option(
    "--calibration",
    metavar="FILE|none",
    default="none",
    show_default=True,
    help="Features that `dflash-trt capture` wrote; none: exact bounds from the weights.",
)
@click.option("--force", is_flag=True, help="Replace an existing output directory.")
@click.option(
    "--threads",
    type=click.IntRange(0, 1024),
    default=0,
    show_default=True,
    help="Threads that pack, and train with --recover; 0: as many as pay.",
)
@recovery_options
def quantize(
    draft: str,
    output: Path,
    recipe: str | None,
    features: Path | None,
    max_tau_loss: float | None,
    max_bytes: int | None,
    held_out: Path | None,
    loadable_by: Runtime,
    formats: tuple[str, ...],
    context_tokens: int,
    objective: str,
    gpu: str | None,
    batch_size: int,
    target: str | None,
    calibration: str,
    force: bool,
    threads: int,
    recover: Path | None,
    steps: int | None,
    seed: int | None,
    learning_rate: float | None,
    distillation: float | None,
    plot: Path | None,
) -> None:
    """Write a quantised copy of DRAFT, a checkpoint directory or Hugging Face repository id.

    Recipes: bf16, fp8, nvfp4, nvfp4-native (q, k and v dense, as TensorRT-LLM needs them), nvfp4-w4a16
    (weights only), mixed-nvfp4-fp8; RECIPE+fp8-kv adds the scales of an FP8 context cache.

    With --recover the linear layers are trained before they are packed, on the target's own answers. An
    interrupted training goes on when the same command is given again; the same seed gives the same bytes on
    the same machine with the same number of threads.

    --search writes such a recipe instead: the smallest, or with --objective step-time the fastest by estimate,
    whose replayed loss of tau stays within --max-tau-loss, on the answers that are searched on and on others that
    are held out. The same command goes on after a kill.

    \b
    Examples:
      dflash-trt quantize z-lab/gpt-oss-120b-DFlash -o draft-nvfp4 --recipe nvfp4
      dflash-trt quantize z-lab/gpt-oss-120b-DFlash -o draft-nvfp4 --recipe nvfp4 \\
          --recover features.safetensors --steps 2000 --plot loss.png
      dflash-trt quantize z-lab/gpt-oss-120b-DFlash --search features.safetensors --max-tau-loss 1% -o own.yaml
    """
    _check_together(click.get_current_context(), recipe, features, max_tau_loss)
    options = {"steps": steps, "seed": seed, "learning_rate": learning_rate, "distillation": distillation}
    if features is None:
        check_recovery(recover, plot, {f"--{name.replace('_', '-')}": value for name, value in options.items()})
    checkpoint = read_draft(checkpoint_directory(draft))
    if target is not None:
        partner = read_target(configuration_directory(target))
        check_pair(checkpoint.spec, partner.spec, draft_name=draft, target_name=target)
    if features is not None and max_tau_loss is not None:
        from dflash_trt.cli.quantize_search import SearchOptions, write_searched

        asked = SearchOptions(
            features=features,
            held_out=held_out,
            max_tau_loss=max_tau_loss,
            max_bytes=max_bytes,
            loadable_by=loadable_by,
            formats=tuple(sorted(set(formats))),
            context_tokens=context_tokens,
            gpu=gpu,
            batch_size=batch_size,
            calibration=calibration,
            seed=seed or 0,
        )
        write_searched(checkpoint, draft, asked, output, force=force)
        click.echo(output)
        return
    assert recipe is not None
    chosen, ranges = recipe_and_ranges(checkpoint, recipe, calibration)
    if recover is None:
        summary = _quantized(checkpoint, chosen, ranges, output, force=force, threads=threads)
    else:
        given = {name: value for name, value in options.items() if value is not None}
        summary = recover_draft(
            checkpoint, chosen, recover, output,
            options=given, plot=plot, ranges=ranges, force=force, threads=threads,
        )  # fmt: skip
    click.echo(_describe(summary), err=True)
    click.echo(output)


def _check_together(
    context: click.Context, recipe: str | None, features: Path | None, max_tau_loss: float | None
) -> None:
    """Raises UsageError for options that do not go together."""
    if (recipe is None) == (features is None):
        raise click.UsageError("expected either --recipe or --search")
    if (features is None) != (max_tau_loss is None):
        raise click.UsageError("expected --search and --max-tau-loss together")
    if (context.params["objective"] == "step-time") != (context.params["gpu"] is not None):
        raise click.UsageError("expected --objective step-time and --gpu together")
    others, wanted, found = (
        (SEARCH_OPTIONS, "--search", "--recipe") if features is None else (RECIPE_OPTIONS, "--recipe", "--search")
    )
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_given and parameter.name in others:
            raise click.UsageError(f"{parameter.opts[0]} is for {wanted}, found {found}")


def write_quantized(
    draft: DraftCheckpoint, recipe: str, calibration: str, output: Path, *, force: bool = False, threads: int = 0
) -> None:
    """Quantises `draft` as the options of that name say, and tells on stderr what became of its tensors."""
    chosen, ranges = recipe_and_ranges(draft, recipe, calibration)
    click.echo(_describe(_quantized(draft, chosen, ranges, output, force=force, threads=threads)), err=True)


def recipe_and_ranges(draft: DraftCheckpoint, recipe: str, calibration: str) -> tuple[Recipe, Ranges | None]:
    """What --recipe and --calibration name; None for bounds from the weights."""
    from dflash_trt.quantize.recipe import load_recipe

    chosen = load_recipe(recipe)
    if calibration == "none":
        return chosen, None
    if not chosen.needs_ranges(draft.spec.linear_modules()):
        raise click.UsageError(f"--recipe {recipe} quantises weights only: it has no use for --calibration")
    from dflash_trt.quantize.calibrate import activation_ranges

    return chosen, activation_ranges(draft, Path(calibration))


def _quantized(
    draft: DraftCheckpoint, recipe: Recipe, ranges: Ranges | None, output: Path, *, force: bool, threads: int
) -> Summary:
    from dflash_trt.quantize.convert import quantize_checkpoint

    return quantize_checkpoint(draft, recipe, output, ranges=ranges, force=force, threads=threads)


def _describe(summary: Summary) -> str:
    """'15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868 KiB -> 340 KiB'."""
    dense = {"dense": summary.dense_layers} if summary.dense_layers else {}
    counts = ", ".join(f"{count} {kind}" for kind, count in (summary.layers | dense).items())
    total = sum(summary.layers.values()) + summary.dense_layers
    return (
        f"{total} linear layers: {counts}; {summary.copied_tensors} other tensors copied unchanged;"
        f" {human_bytes(summary.source_bytes)} -> {human_bytes(summary.output_bytes)}"
    )
