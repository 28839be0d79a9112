# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.estimate import open_acceptances, open_system, read_file
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import quoted
from dflash_trt.files.write import OutputKind, new_file

if TYPE_CHECKING:
    from dflash_trt.deploy.deployment_file import DeploymentFile
    from dflash_trt.observe.estimate.tuning import Candidate, Tuning

DEPLOYMENT = OutputKind(name="a deployment file", recognizes=lambda file: False, form="file", option="--output FILE")
"""People edit them: none is replaced."""
RECIPES = {"native": ("bf16", "nvfp4-native"), "engine": ("bf16", "fp8", "nvfp4")}


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
    help="In place of the model: a run of `bench run`, or a file of points.",
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
    from dflash_trt.observe.estimate.constants import rates
    from dflash_trt.observe.estimate.curve import Traffic
    from dflash_trt.observe.estimate.run_points import open_points
    from dflash_trt.observe.estimate.tuning import tune as choose

    if output is not None and (output.suffix != ".yaml" or not output.parent.is_dir()):
        raise click.UsageError(f"--output: expected a .yaml file in an existing directory, found {output}")
    if output is not None and output.exists():
        raise ConfigError(f"{output}: expected a new file, found one", hint="remove it, or choose another name")
    deployment, system = open_system(config, runtime, target, draft)
    acceptances, source = open_acceptances(system, acceptance, tau, None)
    points = None if measured is None else open_points(measured, system)
    has_fp4 = rates(system.gpu, runtime).fp4_flops > 0
    fitting = [recipe for recipe in RECIPES[deployment.mode] if has_fp4 or not recipe.startswith("nvfp4")]
    recipes = [deployment.recipe] if points or deployment.draft_sizes.quantized else fitting
    tuning = choose(
        {recipe: open_system(config, runtime, target, draft, recipe=recipe)[1] for recipe in recipes},
        Traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens),
        acceptances["dflash"],
        slo,
        measured=points,
        is_scheduled=runtime != "sglang",
    )
    if tuning.schedule[0][1] == 0:
        raise ConfigError(
            "tune: expected drafts to pay for one user, found plain decoding faster",
            hint="serve without a drafter: serve-config --method none",
        )
    text = _deployment(read_file(config), tuning, prompt_tokens + output_tokens)
    if output is not None:
        with new_file(output, DEPLOYMENT) as new:
            new.write_text(text)
    if as_json:
        document = {"runtime": runtime, "acceptance_source": source, **msgspec.structs.asdict(tuning)}
        print_json("tune", {**document, "deployment": text})
        return
    _print(tuning, runtime, source)
    click.echo(
        text
        if output is None
        else f"{output} written; next: dflash-trt serve-config {quoted(output)} --runtime {runtime}"
    )


def _deployment(file: DeploymentFile, tuning: Tuning, tokens: int) -> str:
    """The deployment file with the settings chosen; what they do not concern stays as it was."""
    import yaml

    from dflash_trt.deploy.resolve import DEFAULTS

    best = tuning.best
    gpu, _, count = file.gpus.rpartition("x")
    first = tuning.schedule[0][1]
    copies = f", {int(count) // best.tensor_parallel} times" if best.tensor_parallel < int(count) else ""
    values = msgspec.to_builtins(file)
    values |= {
        "description": f"{file.description}; tuned for {tuning.slo:g} tokens/s/user{copies}",
        "gpus": f"{gpu}x{best.tensor_parallel}",
        "recipe": best.recipe,
        "tensor_parallel": best.tensor_parallel,
        "expert_parallel": best.expert_parallel,
        "max_batch_size": best.batch,
        "max_seq_len": max(tokens, file.max_seq_len or 0),
        "draft_tokens": first,
        "draft_schedule": dict(tuning.schedule) if len(tuning.schedule) > 1 else None,
    }
    kept = {key: value for key, value in values.items() if value != DEFAULTS.get(key, None)}
    return str(yaml.safe_dump(kept, sort_keys=False, width=120, allow_unicode=True))


def _print(tuning: Tuning, runtime: str, source: str) -> None:
    best = tuning.best
    columns = ("ranks", "experts", "recipe", "batch", "drafts", "tokens/s/user", "tokens/s/GPU", "limit")
    shown = [best, *tuning.others[:7]]
    print_table(f"settings for {tuning.slo:g} tokens/s/user; {source}", columns, [_row(one) for one in shown])
    user, gpu = tuning.user_rate, tuning.gpu_rate
    click.echo(f"\nbest: {user.value:.0f} tokens/s/user ({user.low:.0f} to {user.high:.0f} over constants' ranges),"
               f" {gpu.value:.0f} tokens/s/GPU ({gpu.low:.0f} to {gpu.high:.0f})")  # fmt: skip
    margins = [rate / tuning.slo - 1 for rate in (user.value, user.low)]
    click.echo(f"margin: {margins[0]:+.1%} over what was asked for, {margins[1]:+.1%} at the band's low end")
    if tuning.model_error is not None:
        rows = [
            (str(one.measured.batch), str(one.measured.draft_tokens), f"{one.measured.user_rate:.0f}",
             f"{one.predicted_rate:.0f}", f"{one.error:+.0%}")
            for one in tuning.measured
        ]  # fmt: skip
        print_table("the model beside what was measured, tokens/s/user",
                    ("batch", "drafts", "measured", "predicted", "off"), rows)  # fmt: skip
        click.echo(
            f"{len(tuning.measured)} measured points in place of the model, which was off by"
            f" {tuning.model_error:.0%} (median); elsewhere the model times {tuning.model_factor:.2f}"
        )
    first = tuning.schedule[0][1]
    lengths = ", ".join(f"{length} from batch {batch}" for batch, length in tuning.schedule)
    spoken = {
        "trtllm": f"max_draft_len {first}; draft_len_schedule: {lengths}",
        "vllm": f"num_speculative_tokens {first}; num_speculative_tokens_per_batch_size: {lengths}",
        "sglang": f"block of {first + 1} (speculative_num_draft_tokens)",
    }
    click.echo(f"{runtime}: {spoken[runtime]}\n")


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        f"TP {one.tensor_parallel}", f"EP {one.expert_parallel}", one.recipe, str(one.batch), str(one.draft_tokens),
        f"{one.user_rate:.0f}", f"{one.gpu_rate:.0f}", one.limit,
    )  # fmt: skip
