# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.completion import DRAFT
from dflash_trt.cli.config_file import config_option
from dflash_trt.cli.options import (
    ENGINE_OR_ID,
    PATH,
    FiniteRange,
    drain_option,
    engine_target_option,
    options,
    tp_option,
)
from dflash_trt.cli.settings import runtime_options
from dflash_trt.deploy.catalog import needs_thinking_off

if TYPE_CHECKING:
    from dflash_trt.engine.manifest import Manifest
    from dflash_trt.runtime.server.connections.server import HttpServer
    from dflash_trt.runtime.server.endpoints import Endpoints

MAX_BODY_MIB = 1024
NO_THINKING = '"chat_template_kwargs": {"enable_thinking": false}'


@click.command(short_help="Serve an engine over HTTP with the OpenAI API.")
@click.argument("engine", type=ENGINE_OR_ID)
@options(
    engine_target_option,
    click.option("--draft", type=DRAFT,
                 help="Draft of ENGINE, which is then a target: directory or repository id. Its engine is built once."),
    config_option,
    click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
                 help="Address to listen on; 0.0.0.0: all."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one."),
    click.option("--served-model-name", metavar="NAME", help="Default: the engine directory's name, or the target's."),
    click.option("--api-key-file", type=PATH, help="File of API keys, one per line; requests then need one."),
    click.option("--allow-origin", multiple=True, metavar="ORIGIN", help="Allowed CORS origin; may be repeated."),
    click.option("--allowed-host", multiple=True, metavar="NAME",
                 help="Accepted Host header besides loopback names. Default, where --host is no loopback "
                      "address: any."),
    click.option("--max-waiting", type=click.IntRange(min=0), default=256, show_default=True,
                 help="Queued requests; more get 429."),
    click.option("--max-body-mib", type=FiniteRange(0, MAX_BODY_MIB, min_open=True), default=16.0, show_default=True,
                 help="Largest body of a request; larger ones get 413."),
    click.option("--max-answer-mib", type=click.IntRange(min=1), default=1024, show_default=True,
                 help="Memory that all answers together may take; more get 429."),
    runtime_options(),
    tp_option,
    drain_option,
    click.option("--otlp-traces-endpoint", metavar="URL",
                 help="Export OpenTelemetry traces to this URL, over HTTP. Default: as "
                      "OTEL_EXPORTER_OTLP_ENDPOINT says."),
)  # fmt: skip
def serve(
    engine: Path, target: str | None, draft: str | None, host: str, port: int, served_model_name: str | None,
    api_key_file: Path | None, allow_origin: tuple[str, ...], allowed_host: tuple[str, ...], max_waiting: int,
    max_body_mib: float, max_answer_mib: int, num_ranks: int, drain_seconds: int, otlp_traces_endpoint: str | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Serve ENGINE with the OpenAI API, metrics, and a page that shows how it decodes.

    ENGINE is an engine directory, or the repository id of a target or draft: the catalogue has the other, and the
    engine is built once, unquantised, in ~/.cache/dflash-trt/engines ($XDG_CACHE_HOME). A deployment is served by
    TensorRT-LLM, vLLM or SGLang: `dflash-trt serve-config`.

    \b
    Example:
      dflash-trt serve engine --api-key-file keys.txt
      dflash-trt serve Qwen/Qwen3-8B
    """
    from dflash_trt.api.runtime_options import RuntimeOptions
    from dflash_trt.checkpoint.source import checkpoint_label
    from dflash_trt.errors import EngineError
    from dflash_trt.runtime.cached_engine import engine_of
    from dflash_trt.runtime.ranks.join import join
    from dflash_trt.runtime.server.access import ApiKeys
    from dflash_trt.runtime.server.app import make_app
    from dflash_trt.runtime.server.connections.acceptor import BACKLOG
    from dflash_trt.runtime.server.connections.server import HttpServer, exit_on_sigterm
    from dflash_trt.runtime.server.connections.sockets import bind, max_connections
    from dflash_trt.runtime.server.telemetry.log import set_up_logging
    from dflash_trt.runtime.server.telemetry.tracing import open_tracing

    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    runtime = RuntimeOptions(**settings)
    with ExitStack() as stack:
        ranks = stack.enter_context(join(num_ranks, runtime.device))
        if ranks.rank > 0:
            from dflash_trt.runtime.load import open_engine

            open_engine(*engine_of(str(engine), target, draft), runtime, ranks)  # follows rank 0, which serves
        stack.enter_context(exit_on_sigterm())
        listening = stack.enter_context(bind(host, port))  # a port in use is reported before the target is loaded
        connection_limit = max_connections()
        tracing = open_tracing(otlp_traces_endpoint)
        given, (engine, target) = engine, engine_of(str(engine), target, draft)
        if engine != given:
            _say(f"engine: {engine}")
        _say(f"loading {target or engine}")
        from dflash_trt.runtime.load import open_engine  # imports torch and transformers for seconds
        from dflash_trt.runtime.server.endpoints import Endpoints
        from dflash_trt.runtime.server.garbage import rare_collections

        with closing(open_engine(engine, target, runtime, ranks)) as backend, rare_collections():
            name = served_model_name or (engine.resolve().name if engine == given else checkpoint_label(str(target)))
            max_bytes = int(max_body_mib * 2**20)
            names = _names(engine, backend.session.manifest, target)
            _say(backend.session.target.summary)
            if needs_thinking_off(names["draft"]):
                _say(f"{names['draft']} was trained on answers without thinking: {NO_THINKING} in requests")
            endpoints = Endpoints(
                backend,
                name,
                max_waiting=max_waiting,
                max_body_bytes=max_bytes,
                max_answer_bytes=max_answer_mib * 2**20,
                tracing=tracing,
                **names,
            )
            set_up_logging()
            shown = f"[{host}]" if ":" in host else host
            listening.listen(BACKLOG)  # a client that read the next line may connect at once
            _say(f"serving {name} on http://{shown}:{listening.getsockname()[1]}")
            is_loopback = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
            hosts = allowed_host if is_loopback or allowed_host else None
            server = HttpServer(
                make_app(endpoints, keys=keys, origins=allow_origin, hosts=hosts),
                drain_seconds=drain_seconds,
                is_alive=lambda: backend.is_alive,
                cancel_all=endpoints.shut_down,
                connection_limit=connection_limit,
            )
            asyncio.run(_serve(server, listening, endpoints))
            if not server.should_exit:
                raise EngineError(f"the decoder has failed: {backend.error}", hint="start the server again")


async def _serve(server: HttpServer, listening: socket.socket, endpoints: Endpoints) -> None:
    preparing = asyncio.create_task(endpoints.prepare())
    await server.serve([listening])
    preparing.cancel()


def _names(engine: Path, manifest: Manifest, target: str | None) -> dict[str, str | None]:
    """Names of target and draft: repository ids or names of directories, never a path of this machine."""
    from dflash_trt.engine.manifest import target_path

    source = manifest.target_source
    if target is None and source is not None:
        target = source.name if source.revision else Path(target_path(engine, source)).name
    elif target is not None and Path(target).is_dir():
        target = Path(target).resolve().name
    return {"target": target, "draft": manifest.source.name}


def _say(line: str) -> None:
    """Prints a line on stderr; ignores a failure to write it."""
    with suppress(OSError):
        click.echo(line, err=True)
