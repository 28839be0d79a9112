# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt estimate`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.files.picture import PICTURE, save_picture
from dflash_trt.files.write import OutputKind, check_replaceable


@click.command(short_help="Predict a deployment's step, curve and memory, before the GPUs are rented.")
@click.argument("config")
@click.option(
    "--acceptance", type=click.Path(path_type=Path), help="Document of `verify --json`: acceptance by position."
)
@click.option("--tau", type=float, help="Tokens per verify pass with the whole block, in place of --acceptance.")
@click.option("--eagle3-tau", type=float, help="The same for EAGLE-3 with 3 drafts; assumed unless given.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--output-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--runtime", type=click.Choice(["trtllm", "vllm", "sglang"]), default="trtllm", show_default=True)
@click.option(
    "--routing",
    default="power-law",
    show_default=True,
    help="Of experts: power-law, uniform, or a JSON list of counts.",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Whose step is accounted for.")
@click.option("--target", help="Target directory, in place of the deployment's; only its config.json is read.")
@click.option("--draft", help="Draft checkpoint that is here, in place of the deployment's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the curve into this PNG file.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a self-contained page.")
def estimate(
    config: str,
    acceptance: Path | None,
    tau: float | None,
    eagle3_tau: float | None,
    prompt_tokens: int,
    output_tokens: int,
    runtime: str,
    routing: str,
    batch: int,
    target: str | None,
    draft: str | None,
    as_json: bool,
    plot: Path | None,
    html: Path | None,
) -> None:
    """Predict what a deployment will do: one step term by term, throughput per GPU against the speed of a user for
    plain decoding, EAGLE-3 and DFlash, memory and the batch limit.

    CONFIG is a deployment file or the name of a shipped one. Nothing is measured here: docs/estimate.md has the
    constants' sources, and how far predictions were from what others published.

    \b
    Example:
      dflash-trt estimate gpt-oss-120b.b300x8.latency --tau 4.7 --html curve.html
    """
    from dflash_trt.observe.estimate import sources, tables
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.page import write_page
    from dflash_trt.observe.estimate.report import estimate as predict
    from dflash_trt.observe.pages.page_templates import PAGE

    _check_file("--plot", plot, ".png", PICTURE)
    _check_file("--html", html, ".html", PAGE)
    if plot is not None or html is not None:
        import matplotlib  # noqa: F401 - what is missing is said before the work, not after it
    if html is not None:
        import jinja2  # noqa: F401
    deployment, system = sources.open_system(config, runtime, target, draft)
    check_one_acceptance(acceptance, tau, sources.published_tau(system))
    acceptances, source = sources.open_acceptances(system, acceptance, tau, eagle3_tau)
    traffic = Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    result = predict(
        deployment.name,
        system,
        traffic,
        acceptances,
        source=source,
        batch=batch,
        routing=sources.open_routing(routing, system),
    )
    if as_json:
        shown = msgspec.structs.replace(result, system=msgspec.structs.replace(system, memory=None))
        print_json("estimate", msgspec.structs.asdict(shown))
    else:
        lines = (f"{result.name}: {tables.title(result)}", tables.lead(result), tables.caution(result))
        click.echo("\n".join(filter(None, lines)) + "\n")
        print_tables(tables.tables(result))
    if plot is not None:
        from dflash_trt.observe.plots.curves import draw

        save_picture(draw(tables.plot(result), has_heading=True), plot)
    if html is not None:
        write_page(result, html)


def check_one_acceptance(acceptance: Path | None, tau: float | None, published: str | None) -> None:
    """Usage error unless exactly one source is given."""
    if (acceptance is None) == (tau is None):
        hint = f"; its card reports {published}" if published else ""
        raise click.UsageError(f"give one of --acceptance VERIFY.json and --tau X{hint}")


def _check_file(option: str, file: Path | None, suffix: str, kind: OutputKind) -> None:
    if file is None:
        return
    if file.suffix != suffix or not file.parent.is_dir():
        raise click.UsageError(f"{option}: expected a {suffix} file in an existing directory, found {file}")
    check_replaceable(file, kind, force=True)
