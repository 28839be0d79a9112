# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt tune`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.estimate import check_one_acceptance
from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import quoted
from dflash_trt.files.write import OutputKind, new_file

DEPLOYMENT = OutputKind(name="a deployment file", recognizes=lambda file: False, form="file", option="--output FILE")
"""People edit them: none is replaced."""


@click.command(short_help="Choose batch, ranks and draft lengths for a speed, and write the deployment file.")
@click.argument("config")
@click.option("--slo", type=click.FloatRange(min=0, min_open=True), required=True, help="Tokens/s for each user.")
@click.option(
    "--acceptance", type=click.Path(path_type=Path), help="Document of `verify --json`: acceptance by position."
)
@click.option("--tau", type=float, help="Tokens per verify pass with the whole block, in place of --acceptance.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--output-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--runtime", type=click.Choice(["trtllm", "vllm", "sglang"]), default="trtllm", show_default=True)
@click.option(
    "--from",
    "measured",
    type=click.Path(path_type=Path),
    help="A run of `bench run`, in place of the model.",
)
@click.option("--target", help="Target directory, in place of the deployment's; only its config.json is read.")
@click.option("--draft", help="Draft checkpoint that is here, in place of the deployment's.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the deployment file here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def tune(
    config: str,
    slo: float,
    acceptance: Path | None,
    tau: float | None,
    prompt_tokens: int,
    output_tokens: int,
    runtime: str,
    measured: Path | None,
    target: str | None,
    draft: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the settings with the most throughput per GPU that give each user --slo tokens/s: ranks, batch, draft
    lengths by batch and recipe. What is written with -o is a deployment file for `serve-config` and `build`.

    CONFIG is a deployment file or the name of a shipped one. The same model as `estimate`; see docs/estimate.md.

    \b
    Example:
      dflash-trt tune gpt-oss-120b.b300x8.latency --slo 500 --tau 4.7 -o tuned.yaml
    """
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.tuned_deployment import TuneRequest, tune_deployment, tuning_lines, tuning_tables

    if output is not None and (output.suffix != ".yaml" or not output.parent.is_dir()):
        raise click.UsageError(f"--output: expected a .yaml file in an existing directory, found {output}")
    if output is not None and output.exists():
        raise ConfigError(f"{output}: expected a new file, found one", hint="remove it, or choose another name")
    check_one_acceptance(acceptance, tau, None)
    traffic = Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    request = TuneRequest(
        config=config, slo=slo, acceptance=acceptance, tau=tau, traffic=traffic, runtime=runtime, measured=measured,
        target=target, draft=draft,
    )  # fmt: skip
    tuned = tune_deployment(request)
    tuning, source, text = tuned.tuning, tuned.acceptance_source, tuned.text
    if output is not None:
        with new_file(output, DEPLOYMENT) as new:
            new.write_text(text)
    if as_json:
        document = {"runtime": runtime, "acceptance_source": source, **msgspec.structs.asdict(tuning)}
        print_json("tune", {**document, "deployment": text})
        return
    print_tables(tuning_tables(tuning, source))
    for line in tuning_lines(tuning, runtime, tuned.num_gpus):
        click.echo(line)
    next_command = f"dflash-trt serve-config {quoted(output or Path('FILE'))} --runtime {runtime}"
    click.echo(f"\n{text}" if output is None else f"{output} written; next: {next_command}")
