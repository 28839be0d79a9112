# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.errors import ConfigError
from dflash_trt.files.picture import PICTURE
from dflash_trt.files.write import OutputKind, check_replaceable
from dflash_trt.observe.plots.methods import TITLES

if TYPE_CHECKING:
    from dflash_trt.deploy.deployment_file import DeploymentFile
    from dflash_trt.deploy.resolve import ResolvedDeployment
    from dflash_trt.observe.estimate.acceptance_profile import Acceptance
    from dflash_trt.observe.estimate.bands import Band
    from dflash_trt.observe.estimate.report import Curve, Estimate
    from dflash_trt.observe.estimate.shapes import Method, System

ROUTINGS = ("power-law", "uniform")


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
@click.option("--simulate", metavar="TRACE|poisson:RATE", help="Simulate a load instead: requests/s, or a JSONL trace.")
@click.option("--seconds", type=click.FloatRange(1), default=600.0, show_default=True, help="Of a poisson load.")
@click.option("--slo", type=click.FloatRange(min=0, min_open=True), help="Tokens/s of a user that goodput counts.")
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
    simulate: str | None,
    seconds: float,
    slo: float | None,
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
      dflash-trt estimate gpt-oss-120b.b300x8.latency --tau 4.7 --simulate poisson:15 --slo 300
    """
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.page import write_page
    from dflash_trt.observe.estimate.report import estimate as predict
    from dflash_trt.observe.plots.page_parts import PAGE

    _check_file("--plot", plot, ".png", PICTURE)
    _check_file("--html", html, ".html", PAGE)
    if plot is not None:
        import matplotlib  # noqa: F401 - what is missing is said before the work, not after it
    deployment, system = open_system(config, runtime, target, draft)
    acceptances, source = open_acceptances(system, acceptance, tau, eagle3_tau)
    traffic = Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    if simulate is not None:
        from dflash_trt.cli.simulate import print_simulations, simulate_load

        if plot is not None or html is not None:
            raise click.UsageError("--plot and --html draw the curve; --simulate has none")
        runs = simulate_load(deployment, system, acceptances["dflash"], simulate, traffic, seconds, slo)
        print_simulations(deployment.name, simulate, source, slo, runs, as_json=as_json)
        return
    result = predict(
        deployment.name,
        system,
        traffic,
        acceptances,
        source=source,
        batch=batch,
        routing=open_routing(routing, system),
    )
    if as_json:
        shown = msgspec.structs.replace(result, system=msgspec.structs.replace(system, memory=None))
        print_json("estimate", msgspec.structs.asdict(shown))
    else:
        print_estimate(result)
    if plot is not None:
        from dflash_trt.observe.estimate.plot import draw

        draw(result, plot)
    if html is not None:
        write_page(result, html)


def read_file(config: str) -> DeploymentFile:
    """The deployment file that CONFIG names."""
    from dflash_trt.deploy.deployment_file import deployment_path, load_deployment

    if (path := deployment_path(config)) is None:
        raise ConfigError(
            f"{config}: expected a deployment's file (.yaml) or name, found neither",
            hint="dflash-trt serve-config --list",
        )
    return load_deployment(path)


def open_system(
    config: str, runtime: str, target: str | None, draft: str | None, recipe: str | None = None
) -> tuple[ResolvedDeployment, System]:
    """The resolved deployment that CONFIG names, with another recipe or its own, and what the model makes of it."""
    from dflash_trt.deploy.resolve import resolve
    from dflash_trt.observe.estimate.inputs import system

    file = read_file(config)
    if recipe is not None:
        file = msgspec.structs.replace(file, recipe=recipe)
    deployment = resolve(file, Path(config).stem if config.endswith(".yaml") else config, draft=draft)
    return deployment, system(deployment, runtime, target)


def open_acceptances(
    system: System, acceptance: Path | None, tau: float | None, eagle3_tau: float | None
) -> tuple[dict[Method, Acceptance], str]:
    """Acceptance by method, and where DFlash's is from; usage error unless exactly one source is given."""
    from dflash_trt.observe.estimate.acceptance_profile import Acceptance, from_tau, read_acceptance
    from dflash_trt.observe.estimate.constants import constants
    from dflash_trt.observe.estimate.published_points import published_taus

    assert system.draft is not None
    if (acceptance is None) == (tau is None):
        known = published_taus().get(system.draft.name)
        hint = f"; its card reports {known}" if known else ""
        raise click.UsageError(f"give one of --acceptance VERIFY.json and --tau X{hint}")
    length = system.draft.max_draft_tokens
    eagle3 = constants().eagle3["eagle3_acceptance"].value
    by_method: dict[Method, Acceptance] = {
        "eagle3": Acceptance((eagle3,)) if eagle3_tau is None else from_tau(eagle3_tau, 3)
    }
    if acceptance is not None:
        by_method["dflash"] = read_acceptance(acceptance)
        return by_method, f"measured, {acceptance}"
    assert tau is not None
    by_method["dflash"] = from_tau(tau, length)
    return by_method, f"tau {tau:g} at {length} drafts, every position holding equally often"


def open_routing(text: str, system: System) -> list[float] | None:
    """The probability that a token takes each expert; None: the power law of the constants."""
    from dflash_trt.observe.estimate.acceptance_profile import read_routing
    from dflash_trt.observe.estimate.routing import inclusion

    target = system.target
    if text == "power-law" or not target.num_experts:
        return None
    if text == "uniform":
        return [target.top_k / target.num_experts] * target.num_experts
    if not Path(text).is_file():
        raise ConfigError(f"--routing: expected {', '.join(ROUTINGS)} or a JSON file, found {text!r}")
    return list(inclusion(read_routing(Path(text), target.num_experts), target.top_k))


def print_estimate(result: Estimate) -> None:
    """Tables: the step, the curve, throughput at given speeds, memory."""
    system, traffic = result.system, result.traffic
    shape = (
        f"{system.gpu}x{system.num_gpus}, TP {system.tensor_parallel}, EP {system.expert_parallel}, {system.runtime}"
    )
    click.echo(f"{result.name}: {system.target.target} on {shape}")
    click.echo(
        f"{traffic.prompt_tokens} prompt and {traffic.output_tokens} output tokens; {result.acceptance_source}"
        "\npredicted, not measured; EAGLE-3's shape is assumed\n"
    )
    for account in result.accounts:
        at = account.point
        experts = f", {account.experts_touched:.0f} experts a layer" if account.experts_touched else ""
        title = f"one step, {TITLES[at.method]}: batch {at.batch}, {at.draft_tokens} drafts, tau {at.tau:.2f}{experts}"
        total = sum(term.seconds for term in account.terms)
        rows = [_term_row(t.part, t.name, t.seconds, total, t.bytes) for t in account.terms]
        rows.append(_term_row("all", "", total, total, sum(term.bytes for term in account.terms)))
        print_table(title, ("part", "term", "us", "share", "read"), rows)
    for curve in result.curves:
        _print_curve(curve, system.max_batch_size)
    columns = ("tokens/s/user", *(f"{TITLES[c.method]}, tokens/s/GPU" for c in result.curves), "DFlash / plain")
    rows = []
    for ratio in result.at_rates:
        plain, dflash = ratio.gpu_rates["none"], ratio.gpu_rates["dflash"]
        times = f"{dflash / plain:.1f}x" if plain else "plain ends before" if dflash else ""
        rows.append((f"{ratio.user_rate:.0f}", *(f"{r:.0f}" if r else "-" for r in ratio.gpu_rates.values()), times))
    print_table("throughput per GPU at a given speed", columns, rows)
    memory = {item.name: item.bytes for item in result.curve("dflash").memory}
    title = f"memory of one GPU, DFlash: {system.max_batch_size} requests of {traffic.max_tokens} tokens"
    rows = [(name, human_bytes(size)) for name, size in memory.items()]
    rows.append(
        ("free of " + human_bytes(system.gpu_memory_bytes), _signed(system.gpu_memory_bytes - sum(memory.values())))
    )
    print_table(title, ("item", "bytes"), rows)
    rows = [(i.constant, f"{i.at_low - 1:+.1%}", f"{i.at_high - 1:+.1%}") for i in result.influences[:6]]
    print_table("what moves one user's speed most, DFlash", ("constant", "at its low end", "at its high end"), rows)


def _print_curve(curve: Curve, configured: int) -> None:
    title = (
        f"{TITLES[curve.method]}: memory allows batch {curve.limit.batch} ({curve.limit.reason}), set is {configured}"
    )
    columns = ("batch", "drafts", "tau", "step, ms", "tokens/s/user", "tokens/s/GPU")
    rows = []
    for entry in curve.points:
        p = entry.point
        if p.batch & (p.batch - 1) == 0:  # powers of two are enough for a terminal; --json has all
            values = (str(p.batch), str(p.draft_tokens), f"{p.tau:.2f}", f"{p.step_seconds * 1e3:.2f}")
            rows.append((*values, _band(entry.user_rate), _band(entry.gpu_rate)))
    print_table(title, columns, rows)
    click.echo(f"largest batch: {curve.limit.batch} ({curve.limit.reason})\n")


def _band(band: Band) -> str:
    return f"{band.value:.0f} ({band.low:.0f}-{band.high:.0f})"


def _term_row(part: str, name: str, seconds: float, total: float, read: float) -> tuple[str, ...]:
    return part, name, f"{seconds * 1e6:.0f}", f"{seconds / total:.0%}", human_bytes(round(read)) if read else ""


def _signed(count: int) -> str:
    return f"-{human_bytes(-count)}" if count < 0 else human_bytes(count)


def _check_file(option: str, file: Path | None, suffix: str, kind: OutputKind) -> None:
    if file is None:
        return
    if file.suffix != suffix or not file.parent.is_dir():
        raise click.UsageError(f"{option}: expected a {suffix} file in an existing directory, found {file}")
    check_replaceable(file, kind, force=True)
