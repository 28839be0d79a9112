# SPDX-License-Identifier: Apache-2.0
"""Output of `dflash-trt serve-config`: a file for a runtime, and the command that starts it."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import yaml

from dflash_trt import __version__
from dflash_trt.deploy.choices import chosen, circumstances
from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.runtime_arguments import merged
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.server_arguments import server_arguments
from dflash_trt.deploy.trtllm_arguments import is_engine_mode, trtllm_arguments, trtllm_command
from dflash_trt.files.command import command_line, plain


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment in a runtime's own format."""

    deployment: ResolvedDeployment
    runtime: Runtime
    method: Method
    port: int
    arguments: dict[str, Any]
    """Arguments of the runtime by name."""
    environment: dict[str, str]
    """Variables that the command sets."""
    text: str
    """For stdout: YAML, or a command line."""
    command: list[str]
    """The command that starts trtllm-serve, up to the name of its file; of the others the text is the command."""
    node_variables: str = ""
    """Assignments of variables before the command that runs the text as a script on each of several nodes."""

    @property
    def is_engine_mode(self) -> bool:
        """Whether our drafter replaces TensorRT-LLM's."""
        return self.runtime == "trtllm" and is_engine_mode(self.deployment, self.method)

    @property
    def head(self) -> str:
        """First line of the text: a comment with the settings' digest."""
        return self.text.partition("\n")[0]

    def words(self, file: str) -> list[str]:
        """The command that starts the server; trtllm-serve reads the text from `file`."""
        if self.runtime == "trtllm":
            return [*self.command, file]
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    def start(self, file: str) -> str:
        """Line of shell that starts the server from the text in `file`."""
        words = self.words(file) if self.runtime == "trtllm" else ["sh", file]
        return f"{self.node_variables}{command_line(words)}"


def render(deployment: ResolvedDeployment, runtime: Runtime, method: Method, *, host: str, port: int) -> Rendered:
    """Render deterministically; methods differ in what drafts need.

    Raises ConfigError for a runtime that cannot serve the deployment.
    """
    name = plain(deployment.name, "the deployment's name")
    head = (
        f"# dflash-trt {__version__}: {name} for {deployment.gpus}, {deployment.file.purpose}"
        f" (settings {deployment.digest})\n"
    )
    environment: dict[str, str] = {}
    command: list[str] = []
    if runtime == "trtllm":
        arguments = trtllm_arguments(deployment, method)
        command = trtllm_command(deployment, method, host, port)
        text = yaml.safe_dump(arguments, sort_keys=False, default_flow_style=False, width=120)
    else:
        arguments = server_arguments(deployment, runtime, method, host, port)
        arguments = merged(arguments, deployment.more_arguments(runtime, method))
        environment = chosen(runtime, circumstances(deployment, method), is_environment=True)
        text = command_text(runtime, arguments, environment)
    return Rendered(
        deployment=deployment, runtime=runtime, method=method, port=port, arguments=arguments,
        environment=environment, text=head + text, command=command,
    )  # fmt: skip
