# SPDX-License-Identifier: Apache-2.0
"""Servers of the runtimes that are installed here, started as `serve-config` would write it."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.weight_commands import commands_for_draft
from dflash_trt.errors import ConfigError, MissingDependencyError
from dflash_trt.files.command import command_line
from dflash_trt.observe.servers.local_server import HOST, LocalServer, free_port


def installed_runtimes() -> dict[Runtime, str]:
    """Program by runtime that is installed here."""
    programs: dict[Runtime, str | None] = {"trtllm": shutil.which("trtllm-serve"), "vllm": shutil.which("vllm")}
    found = {runtime: path for runtime, path in programs.items() if path is not None}
    if find_spec("sglang") is not None:
        found["sglang"] = sys.executable
    return found


def chosen_runtime(deployment: ResolvedDeployment, asked: Runtime | None, source: str) -> Runtime:
    """The runtime asked for, or the first that is installed; MissingDependencyError where it is not.

    Raises ConfigError for GPUs of several nodes.
    """
    wanted = deployment.runtimes if asked is None else (asked,)
    steps = command_line(["dflash-trt", "serve-config", source, "--runtime", wanted[0], "-o", "FILE"])
    if deployment.gpus.nodes > 1:
        raise ConfigError(
            f"{deployment.name}: expected GPUs of this node, found {deployment.gpus}",
            hint=f"start it on each node, then ask doctor: {steps}",
        )
    if (runtime := next((each for each in wanted if each in installed_runtimes()), None)) is not None:
        return runtime
    raise MissingDependencyError(
        f"{deployment.name} needs {' or '.join(wanted)}, which is not installed here",
        hint=f"install one, or use its container: {steps}",
    )


def deployment_server(deployment: ResolvedDeployment, runtime: Runtime, method: Method, source: str) -> LocalServer:
    """The installed runtime with the configuration that `serve-config` writes.

    Raises ConfigError for a draft that has yet to be converted or built.
    """
    port = free_port()
    rendered = render(deployment, runtime, method, host=HOST, port=port)
    if commands := commands_for_draft(deployment, source, runtime, method):
        raise ConfigError(f"{deployment.name}: expected the draft here, found none", hint=commands[0])
    words = rendered.words("{}")
    program = installed_runtimes()[runtime]
    words = [program if word in ("trtllm-serve", "vllm") else word for word in words]
    if words[0] == "python":
        words[0] = sys.executable
    file = rendered.text if runtime == "trtllm" else None
    return LocalServer(words=words, port=port, file=file)
