# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from dflash_trt.cli.completion import DEPLOYMENT
from dflash_trt.cli.estimate import check_one_acceptance
from dflash_trt.cli.options import FILE, PATH, FiniteRange, check_output_file, deployment_options, json_option, options
from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import quoted
from dflash_trt.files.write import OutputKind, new_file

TUNED_FILE = OutputKind(name="a deployment file", recognizes=lambda file: False, form="file", option="--output FILE")


@click.command(short_help="Choose batch, ranks and draft lengths for a speed, and write the deployment file.")
@click.argument("config", type=DEPLOYMENT)
@options(
    click.option("--slo", type=FiniteRange(min=0, min_open=True), required=True, help="Tokens/s for each user."),
    deployment_options,
    click.option("--measured", metavar="RUN", type=PATH, help="A run of `bench run`, in place of the model."),
    click.option("--num-gpus", "gpus", type=click.IntRange(min=1), help="GPUs of all servers. Default: one server's."),
    click.option(
        "--request-rate",
        type=FiniteRange(min=0, min_open=True),
        help="Requests/s of all servers: take the fewest GPUs that serve them.",
    ),
    click.option("-o", "--output", type=FILE, help="Write the deployment file here."),
    json_option,
)
def tune(
    config: str, output: Path | None, as_json: bool, prompt_tokens: int, output_tokens: int, runtime: Runtime | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Find the settings with the most throughput per GPU that give each user --slo tokens/s: ranks, batch, draft
    lengths by batch and recipe. -o writes a deployment file for `serve-config` and `build`. With
    --num-gpus and --request-rate, also how many servers of it.

    CONFIG is a deployment file or the name of a shipped one. The same model as `estimate`; see docs/estimate.md.

    \b
    Example:
      dflash-trt tune gpt-oss-120b.b300x8.latency --slo 500 --tau 4.7 -o tuned.yaml
    """
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.inputs import default_runtime
    from dflash_trt.observe.estimate.tuned_deployment import tune_deployment, tuning_lines, tuning_tables

    if output is not None and output.exists():  # people edit deployment files, so none is replaced
        raise ConfigError(f"{output} exists already", hint="remove it, or choose another name")
    check_output_file("--output", output, ".yaml", TUNED_FILE)
    check_one_acceptance(settings["acceptance"], settings["tau"])
    runtime = runtime or default_runtime(config)
    traffic = Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    tuned = tune_deployment(config, traffic, runtime=runtime, **settings)
    tuning, source, text = tuned.tuning, tuned.acceptance_source, tuned.text
    if output is not None:
        with new_file(output, TUNED_FILE) as new:
            new.write_text(text)
    if as_json:
        document = {"runtime": runtime, "acceptance_source": source, **msgspec.structs.asdict(tuning)}
        print_json("tune", {**document, "deployment": text})
        return
    print_tables(tuning_tables(tuning, source))
    for line in tuning_lines(tuning, runtime, tuned.num_gpus):
        click.echo(line)
    click.echo(f"{tuned.validation} (docs/estimate.md)")
    if output is None:
        click.echo("next: the same with -o FILE.yaml writes the deployment file", err=True)
    else:
        replicas = f" --launcher kubernetes --replicas {tuning.replicas}" if tuning.replicas > 1 else ""
        command = f"dflash-trt serve-config {quoted(output)} --runtime {runtime}{replicas}"
        click.echo(f"{output} written; next: {command}", err=True)
