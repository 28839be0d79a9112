# SPDX-License-Identifier: Apache-2.0
"""Output of `dflash-trt serve-config`: a file for a runtime, and the command that starts it."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from dflash_trt import __version__
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.flags import command_text
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.server_arguments import server_arguments
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments, trtllm_command
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line, plain


class Rendered(msgspec.Struct, frozen=True):
    """A deployment in a runtime's own format."""

    arguments: dict[str, Any]
    """Arguments by name, for checks."""
    text: str
    """For stdout: YAML, or a command line."""
    start: str
    """The command that starts the server from that text."""


def render(deployment: ResolvedDeployment, runtime: Runtime, method: Method, *, host: str, port: int) -> Rendered:
    """Render deterministically; methods differ only in the settings that select them.

    Raises ConfigError for a runtime that cannot serve the deployment.
    """
    if runtime not in deployment.runtimes:
        raise ConfigError(
            f"{deployment.name}: runtimes: expected {' or '.join(deployment.runtimes)}, found {runtime}, which cannot"
            " serve this deployment",
            hint=f"give --runtime {deployment.runtimes[0]}; the file says why",
        )
    name = plain(deployment.name, "the deployment's name")
    head = (
        f"# dflash-trt {__version__}: {name} for {deployment.gpus}, {deployment.purpose}"
        f" (settings {deployment.digest})\n"
    )
    if runtime == "trtllm":
        arguments = trtllm_arguments(deployment, method)
        text = head + yaml.safe_dump(arguments, sort_keys=False, default_flow_style=False, width=120)
        return Rendered(arguments, text, command_line(trtllm_command(deployment, method, host, port)))
    arguments = server_arguments(deployment, runtime, method, host, port)
    return Rendered(arguments, head + command_text(runtime, arguments), "sh FILE")
