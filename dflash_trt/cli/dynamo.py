# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt dynamo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.options import ENGINE, drain_option, engine_target_option
from dflash_trt.cli.settings import runtime_options

MAX_SYSTEM_PORT = 2**15 - 1
"""Largest port of Dynamo 1.6.1, which reads it into a signed 16-bit number."""


@click.command(short_help="Serve an engine as an NVIDIA Dynamo worker.")
@click.argument("engine", type=ENGINE)
@engine_target_option
@click.option("--served-model-name", metavar="NAME", help="Default: the name of the engine directory.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
              help="Address at which frontend and router reach this machine.")  # fmt: skip
@click.option(
    "--metrics-port", type=click.IntRange(-1, MAX_SYSTEM_PORT), envvar="DYN_SYSTEM_PORT", show_envvar=True,
    help="Serve /metrics, /health and /live here; 0: any, -1: nowhere.",
)  # fmt: skip
@click.option("--namespace", metavar="NAME", envvar="DYN_NAMESPACE", default="dynamo", show_default=True,
              show_envvar=True, help="Namespace of the worker and its frontend.")  # fmt: skip
@click.option(
    "--discovery-backend", type=click.Choice(["etcd", "kubernetes", "file", "mem"]), default="etcd", show_default=True,
    envvar="DYN_DISCOVERY_BACKEND", show_envvar=True, help="Where workers are found; file: in the folder DYN_FILE_KV.",
)  # fmt: skip
@click.option("--reasoning-parser", metavar="NAME", envvar="DYN_REASONING_PARSER", show_envvar=True,
              help="One of Dynamo's.")  # fmt: skip
@click.option("--tool-call-parser", metavar="NAME", envvar="DYN_TOOL_CALL_PARSER", show_envvar=True,
              help="One of Dynamo's.")  # fmt: skip
@runtime_options()
@drain_option
def dynamo(
    engine: Path, target: str | None, served_model_name: str | None, host: str, metrics_port: int | None,
    namespace: str, discovery_backend: str, reasoning_parser: str | None, tool_call_parser: str | None,
    drain_seconds: int, **options: Any,
) -> None:  # fmt: skip
    """Serve ENGINE, an engine directory, as a worker of Dynamo's frontend (docs/scaling.md).

    Dynamo's own DYN_* variables also apply.

    \b
    Example:
      dflash-trt dynamo engine --discovery-backend file
    """
    from dflash_trt.api.runtime_options import RuntimeOptions
    from dflash_trt.errors import MissingDependencyError
    from dflash_trt.runtime.checked_pair import CheckedPair
    from dflash_trt.runtime.dynamo.file_discovery import set_addresses

    set_addresses(host, metrics_port)
    try:
        from dflash_trt.runtime.dynamo.serve_worker import serve
    except ModuleNotFoundError as error:
        from dflash_trt.cli.doctor_machine import DYNAMO

        raise MissingDependencyError(f"missing package {error.name}", hint=DYNAMO) from None
    settings = RuntimeOptions(**options)
    pair = CheckedPair.read(engine, target)
    name = served_model_name or engine.resolve().name
    if pair.tokenizer.chat_template is None:
        click.echo(f"{pair.target_name}: no chat template: {name} serves completions only", err=True)
    serve(
        pair, settings, name, namespace=namespace, discovery_backend=discovery_backend,
        reasoning_parser=reasoning_parser, tool_call_parser=tool_call_parser, drain_seconds=drain_seconds,
    )  # fmt: skip
