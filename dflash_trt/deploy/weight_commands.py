# SPDX-License-Identifier: Apache-2.0
"""Commands that download or make the weights which a server reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.trtllm_arguments import is_engine_mode, place, trtllm_draft
from dflash_trt.files.command import argument, command_line

DOWNLOAD = "hf download"


def weight_commands(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> Iterator[str]:
    """Commands that download or make what the server reads and is not here, TensorRT plans aside.

    They need no GPU.
    """
    if not Path(deployment.target).is_dir():
        yield f"{DOWNLOAD} {command_line([argument(deployment.target, 'target')])}"
    if method == "eagle3" and not Path(model := deployment.eagle3_drafter().model).is_dir():
        yield f"{DOWNLOAD} {command_line([argument(model, 'eagle3.model')])}"
    if method != "dflash":
        return
    draft = deployment.draft if runtime == "trtllm" or deployment.mode == "native" else deployment.checkpoint
    read = trtllm_draft(deployment) if runtime == "trtllm" else draft
    if Path(read).is_dir():
        return
    if draft != deployment.checkpoint:  # quantised, or an engine
        yield command_line(["dflash-trt", "build", source])
    elif read != draft:
        yield command_line(["dflash-trt", "quantize", draft, "--recipe", "bf16", "-o", read])
    else:
        yield f"{DOWNLOAD} {command_line([argument(draft, 'draft')])}"


def plans_command(deployment: ResolvedDeployment, runtime: Runtime, method: Method) -> list[str]:
    """Words that build engine mode's TensorRT plans, on the GPU and with the TensorRT that will run them; else none."""
    if runtime != "trtllm" or not is_engine_mode(deployment, method):
        return []
    return ["dflash-trt", "build", "--plans-for", place(deployment.draft)]


def commands_for_draft(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> list[str]:
    """Commands that convert or build the draft which the server reads; none where it is here, or is downloaded."""
    commands = weight_commands(deployment, source, runtime, method)
    made = [command for command in commands if not command.startswith(DOWNLOAD)]
    return [*made, *([command_line(plans_command(deployment, runtime, method))] if made else [])]
