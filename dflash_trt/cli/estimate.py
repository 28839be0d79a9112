# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt estimate`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.completion import DEPLOYMENT
from dflash_trt.cli.options import (
    FILE,
    FINITE,
    check_output_file,
    check_picture,
    deployment_options,
    json_option,
    options,
)
from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.deploy.schema import Runtime
from dflash_trt.files.command import quoted
from dflash_trt.observe.plots.picture import save_picture


@click.command(short_help="Predict a deployment's step time, throughput curve and memory.")
@click.argument("config", type=DEPLOYMENT)
@options(
    deployment_options,
    click.option("--eagle3-tau", type=FINITE, help="Tokens per pass of EAGLE-3 with 3 drafts; assumed unless given."),
    click.option("--method", "methods", type=click.Choice(["mtp", "ngram"]), multiple=True,
                 help="Compare with this, too; refused where its acceptance is unknown."),
    click.option("--mtp-tau", type=FINITE, help="Tokens per pass of the target's MTP layers; published unless given."),
    click.option("--ngram-tau", type=FINITE, help="Tokens per pass of n-gram drafts."),
    click.option("--routing", metavar="NAME|JSON", default="power-law", show_default=True,
                 help="Popularity of experts: power-law, uniform, or a JSON list of counts."),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True,
                 help="Batch size of the step that is itemised."),
    click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Number of servers."),
    click.option("--all", "shows_all", is_flag=True, help="Also print steps, larger batches, memory, sensitivity."),
    json_option,
    click.option("--plot", type=FILE, help="Also plot the curve to this PNG file."),
    click.option("--html", type=FILE, help="Also write a self-contained page."),
)  # fmt: skip
def estimate(
    config: str, acceptance: Path | None, tau: float | None, eagle3_tau: float | None, methods: tuple[str, ...],
    mtp_tau: float | None, ngram_tau: float | None, prompt_tokens: int, output_tokens: int, runtime: Runtime | None,
    routing: str, batch: int, replicas: int, target: str | None, draft: str | None, shows_all: bool, as_json: bool,
    plot: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Predict a deployment's performance: throughput per GPU against a user's speed, without speculation, MTP where
    its acceptance is known, EAGLE-3 and DFlash, beside what is published; with --all also steps, memory and limits.

    CONFIG is a deployment file or the name of a shipped one. Nothing is measured here: docs/estimate.md has the
    constants' sources, and how far predictions were from what others published.

    \b
    Example:
      dflash-trt estimate gpt-oss-120b.b300x8.latency --tau 4.7 --html curve.html
    """
    from dflash_trt.observe.diagnosis.published_tau import published_draft_tau
    from dflash_trt.observe.estimate import estimate_text, inputs, tables
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.other_drafts import with_other_drafts
    from dflash_trt.observe.estimate.published_beside import published_lines
    from dflash_trt.observe.estimate.report import estimate as predict
    from dflash_trt.observe.pages.page_templates import PAGE

    check_picture(plot)
    check_output_file("--html", html, ".html", PAGE)
    if html is not None:
        import jinja2  # noqa: F401 - a missing package fails before the work, not after it
        import matplotlib  # noqa: F401
    deployment, system = inputs.open_system(config, runtime or inputs.default_runtime(config), target, draft)
    published = published_draft_tau(deployment.checkpoint) if acceptance is None and tau is None else None
    if published is None:
        check_one_acceptance(acceptance, tau)
    else:
        tau = published.mean
    acceptances, source = inputs.open_acceptances(system, acceptance, tau, eagle3_tau)
    if published is not None:
        source += f" (the mean of {published}: give --tau or --acceptance)"
    others = with_other_drafts(deployment, system, methods, mtp_tau, ngram_tau)
    traffic = Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    result = predict(
        deployment.name, others.system, traffic, acceptances | others.acceptances, source=source, batch=batch,
        routing=inputs.open_routing(routing, system), other_sources=others.sources,
    )  # fmt: skip
    if as_json:
        shown = msgspec.structs.replace(result, system=msgspec.structs.replace(result.system, memory=None))
        print_json("estimate", {"replicas": replicas, **msgspec.structs.asdict(shown)})
    else:
        click.echo(f"{estimate_text.verdict(result, replicas)}\n{result.name}: {estimate_text.title(result)}")
        said = (estimate_text.lead(result), *published_lines(system), estimate_text.caution(system))
        click.echo("\n".join(filter(None, said)) + "\n")
        print_tables(tables.tables(result) if shows_all else tables.short_tables(result))
        given = f"--tau {tau}" if acceptance is None else f"--acceptance {quoted(acceptance)}"
        click.echo(f"next: dflash-trt tune {quoted(Path(config))} --slo TOKENS_PER_SECOND {given}", err=True)
    if plot is not None:
        from dflash_trt.observe.plots.curves import draw

        save_picture(draw(tables.plot(result), has_heading=True), plot)
    if html is not None:
        tables.write_page(result, html)


def check_one_acceptance(acceptance: Path | None, tau: float | None) -> None:
    """Usage error unless exactly one source is given."""
    if (acceptance is None) == (tau is None):
        raise click.UsageError("give one of --acceptance VERIFY.json (from verify --json) and --tau X")
