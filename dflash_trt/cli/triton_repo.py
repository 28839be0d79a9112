# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt triton-repo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from dflash_trt.api.runtime_options import DEFAULTS, Dtype
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.cli.completion import DEPLOYMENT, GPUS
from dflash_trt.cli.deployment_source import print_and_refuse, read_deployment
from dflash_trt.cli.options import PATH, gpu_facts_option, json_option, refuse_given, source_options
from dflash_trt.cli.output import print_written
from dflash_trt.cli.settings import runtime_options
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import METHODS, Method, deployment_path, load_deployment
from dflash_trt.deploy.finding import judged
from dflash_trt.deploy.gpus import GpuFacts
from dflash_trt.deploy.real_classes import check_with_package
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.trtllm_arguments import place, trtllm_arguments
from dflash_trt.deploy.weight_commands import plans_command, weight_commands
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.files.command import command_line
from dflash_trt.triton.model_file import TritonConfig, check_name


@click.command("triton-repo", short_help="Write a model repository for Triton Inference Server.")
@click.argument("source", type=DEPLOYMENT)
@click.option("-o", "--output", type=PATH, required=True, help="Repository to write.")
@click.option("--runtime", type=click.Choice(["trtllm", "embedded"]), default="trtllm", show_default=True,
              help="What serves it.")  # fmt: skip
@click.option("--method", type=click.Choice(METHODS), default="dflash", show_default=True, help="For trtllm.")
@click.option("--version", metavar="VERSION",
              help="Release of TensorRT-LLM; checked by the nearest that is known. Default: the newest.")  # fmt: skip
@source_options
@click.option("--gpus", type=GPUS, help="GPUs, for a SOURCE directory and trtllm: b300x8.")
@gpu_facts_option
@runtime_options("max_batch_size", "dtype", note=" For --runtime embedded.")
@click.option("--name", metavar="NAME", default="tensorrt_llm", show_default=True,
              help="Name of the model; NVIDIA's clients ask for this.")  # fmt: skip
@click.option("--unary", is_flag=True,
              help="One response per request, without streaming, for clients that only know infer.")  # fmt: skip
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
              help="Address in the commands that start the server.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a repository that this command wrote.")
@json_option
def triton_repo(
    source: str, output: Path, runtime: Literal["trtllm", "embedded"], method: Method, version: str | None,
    target: str | None, draft: str | None, gpus: str | None, gpu_facts: GpuFacts | None, max_batch_size: int | None,
    dtype: Dtype, name: str, unary: bool, host: str, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a model repository that serves SOURCE, with the tensors of NVIDIA's llmapi model.

    SOURCE is a deployment, by file or name, or an engine directory or draft checkpoint with --target and for trtllm
    --gpus. The embedded runtime needs the engine directory that `dflash-trt build` writes, and no GPU. The commands
    that start the server go to stderr.

    \b
    Example:
      dflash-trt triton-repo gpt-oss-120b.b300x8.latency -o models
    """
    check_name(name)
    config = TritonConfig(runtime=runtime, decoupled=not unary)
    if runtime == "embedded":
        refuse_given(("method", "version", "gpus", "gpu_facts"), "is for --runtime trtllm")
        arguments, needed = _embedded(source, target, draft, max_batch_size, dtype), ""
    else:
        refuse_given(("max_batch_size", "dtype"), "is for --runtime embedded")
        deployment = read_deployment(source, target, draft, gpus, gpu_facts)
        arguments = {"model": place(deployment.target), **trtllm_arguments(deployment, method)}
        checked = deployment_config(deployment, load_schema("trtllm", version), arguments)
        findings = [*check(checked), *check_with_package(checked.schema, arguments)]
        print_and_refuse(source, "trtllm", judged(findings, deployment.accepted_warnings))
        engine_mode = deployment.mode == "engine" and method == "dflash"
        config = msgspec.structs.replace(config, engine_mode=engine_mode)
        needed = _needed(deployment, source, method)

    from dflash_trt.triton.repository import instructions, write_repository

    commands = instructions(output, name, host=host)
    write_repository(output, name, arguments, config, force=force)
    print_written(
        "triton-repo",
        output,
        f"{needed}{commands}",
        {"model": name, "runtime": runtime, "arguments": arguments},
        as_json=as_json,
    )


def _needed(deployment: ResolvedDeployment, source: str, method: Method) -> str:
    """Commands for what the server reads and is not here; engine mode's plans need the server's own environment."""
    commands = list(weight_commands(deployment, source, "trtllm", method))
    if plans := plans_command(deployment, "trtllm", method):
        commands.append(f"{command_line(plans)}  # with the Python environment and the GPU model of the server")
    return "".join(["get what it reads:\n", *(f"  {command}\n" for command in commands)]) if commands else ""


def _embedded(
    source: str, target: str | None, draft: str | None, max_batch_size: int | None, dtype: Dtype
) -> dict[str, Any]:
    """Arguments of dflash_trt.LLM that are written to model.yaml; the engine must exist and fit the target."""
    from dflash_trt.runtime.checked_pair import default_batch_size, find_target

    engine = Path(draft or source)
    if (file := deployment_path(source)) is not None:
        deployment = load_deployment(file)
        engine, target = Path(draft or file.stem), target or deployment.target
    elif draft is not None:
        raise click.UsageError("a SOURCE directory is the draft itself")
    manifest = read_manifest(engine)
    target, partner = find_target(engine, manifest, target)
    check_pair(manifest.draft, read_target(partner).spec, draft_name=str(engine), target_name=target)
    arguments: dict[str, Any] = {
        "engine": str(engine.resolve()),
        "target": str(partner.resolve()) if Path(target).is_dir() else target,
        "max_batch_size": max_batch_size or default_batch_size(manifest),
    }
    return arguments if dtype == DEFAULTS.dtype else arguments | {"dtype": dtype}
