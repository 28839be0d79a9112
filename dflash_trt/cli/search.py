# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.completion import DRAFT
from dflash_trt.cli.options import PATH, num_bytes, options, parsed, share
from dflash_trt.cli.output import human_bytes, resumable
from dflash_trt.cli.recipes import calibration_option, features_option, read_checked_draft, target_option
from dflash_trt.cli.settings import runtime_options
from dflash_trt.files.command import quoted
from dflash_trt.quantize.loadable import LOADABLE
from dflash_trt.quantize.recipe import RECIPES
from dflash_trt.runtime.progress_display import progress_bar


class FormatType(click.Choice[str]):
    """A number format by the name of its recipe, or by modelopt's, which is its value."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """modelopt's name."""
        name = super().convert(RECIPES.get(value.upper(), value), param, ctx)
        return next(algorithm for algorithm, recipe in RECIPES.items() if recipe == name)


@click.command(short_help="Find the smallest or fastest recipe that keeps acceptance.")
@click.argument("draft", type=DRAFT)
@options(
    click.option("-o", "--output", required=True, type=PATH, help="Recipe to write, a YAML file."),
    features_option,
    click.option("--max-tau-loss", required=True, metavar="SHARE", callback=parsed(share),
                 help="Largest loss of acceptance length (tau) allowed, e.g. 1%."),
    click.option("--max-bytes", metavar="BYTES", callback=parsed(num_bytes),
                 help="Fail if no recipe found is this small."),
    click.option("--held-out", metavar="FILE", type=PATH,
                 help="Captured answers to other prompts, to hold out; by default half of --features."),
    click.option("--loadable-by", type=click.Choice(list(LOADABLE)), default="engine", show_default=True,
                 help="Search among recipes that this runtime loads."),
    click.option("--format", "formats", type=FormatType(RECIPES.values()), multiple=True,
                 default=list(RECIPES.values()),
                 show_default=True, help="Search among these formats; those with w4a16 quantise weights only."),
    click.option("--context-tokens", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Also consider an FP8 context cache, and count the bytes of this many tokens in it."),
    click.option("--objective", type=click.Choice(["bytes", "step-time"]), default="bytes", show_default=True,
                 help="What to minimise; step-time: the drafter's share of a step, estimated for --gpu."),
    click.option("--gpu", metavar="NAME",
                 help="For --objective step-time: a GPU of `estimate`, such as b300 or h200."),
    click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True,
                 help="For --objective step-time: concurrent requests."),
    target_option,
    calibration_option,
    runtime_options("device"),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                 help="Seed of the split into halves."),
    click.option("--force", is_flag=True, help="Replace a recipe that this command wrote."),
)  # fmt: skip
def search(draft: str, output: Path, target: str | None, objective: str, force: bool, **settings: Any) -> None:
    """Find the smallest recipe for DRAFT that keeps the acceptance length (tau) within --max-tau-loss.

    With --objective step-time, the fastest by estimate. The loss is measured on the answers searched on, and
    confirmed on answers held out. After an interruption the same command continues.

    \b
    Example:
      dflash-trt search z-lab/gpt-oss-120b-DFlash --features features.safetensors --max-tau-loss 1% -o own.yaml
    """
    gpu = settings["gpu"]
    if (objective == "step-time") != (gpu is not None):
        raise click.UsageError("--objective step-time and --gpu go together")
    checkpoint = read_checked_draft(draft, target)
    from dflash_trt.observe.estimate.drafter_pass import drafter_seconds
    from dflash_trt.runtime.measure.journal import journal_file
    from dflash_trt.runtime.measure.search.search_job import SearchOptions, search_recipe
    from dflash_trt.runtime.measure.statistics import loss_text

    search_options = SearchOptions(**settings | {"formats": tuple(sorted(set(settings["formats"])))})
    price = None
    if gpu is not None:
        price = drafter_seconds(checkpoint.spec, gpu, search_options.batch_size, search_options.context_tokens)
    with resumable(journal_file(output)):
        space, best = search_recipe(
            checkpoint, draft, search_options, output, price=price, force=force, progress=progress_bar
        )
    if price is not None:
        before, after = (space.cost(choice) * 1e6 for choice in (space.dense, best.choice))
        click.echo(f"a drafter's pass on {gpu}: {before:.1f} -> {after:.1f} us, estimated", err=True)
    before_bytes, after_bytes = (human_bytes(space.checkpoint_bytes(choice)) for choice in (space.dense, best.choice))
    click.echo(f"loss of tau on prompts that were held out: {loss_text(best.held_out)}", err=True)
    words = f"{quoted(Path(draft))} --recipe {quoted(output)} --calibration {quoted(Path(search_options.calibration))}"
    click.echo(f"{before_bytes} -> {after_bytes}; next: dflash-trt quantize {words} -o DIR", err=True)
    click.echo(output)
