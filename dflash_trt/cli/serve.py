# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve`."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import click

from dflash_trt.cli.output import progress_line
from dflash_trt.cli.runtime_options import runtime_options


@click.command(short_help="Serve an engine over HTTP, as OpenAI does.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--served-model-name", metavar="NAME", help="Default: the name of the engine directory.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API keys, one a line; requests need one.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN", help="Allowed CORS origin; may be repeated.")
@runtime_options("max_batch_size")
@click.option(
    "--max-waiting", type=click.IntRange(min=0), default=256, show_default=True, help="Queued requests; beyond: 429."
)
@click.option("--max-body-mib", type=click.FloatRange(min=0, min_open=True), default=16.0, show_default=True)
@runtime_options("draft_length", "cache_gib", "enable_prefix_caching", "device", "dtype")
@click.option(
    "--drain-seconds",
    type=click.IntRange(min=0),
    default=60,
    show_default=True,
    help="Time for running requests at SIGTERM.",
)
def serve(
    engine: Path,
    target: str,
    host: str,
    port: int,
    served_model_name: str | None,
    api_key_file: Path | None,
    allow_origin: tuple[str, ...],
    max_batch_size: int | None,
    max_waiting: int,
    max_body_mib: float,
    draft_length: str,
    cache_gib: float,
    enable_prefix_caching: bool,
    device: str,
    dtype: str,
    drain_seconds: int,
) -> None:
    """Serve ENGINE, an engine directory, with the OpenAI API, metrics, and a page that shows how it decodes.

    \b
    Example:
      dflash-trt serve engine --target openai/gpt-oss-120b --api-key-file keys.txt
    """
    from dflash_trt.server.app import make_app
    from dflash_trt.server.http_server import HttpServer, bind, set_up_logging
    from dflash_trt.server.limits import ApiKeys

    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    with bind(host, port) as listening:  # a port in use is reported before the target is loaded
        click.echo(f"loading {target}", err=True)
        from dflash_trt.llm import LLM
        from dflash_trt.server.endpoints import Endpoints

        with progress_line(f"loading {target}"):
            llm = LLM(
                engine,
                target,
                max_batch_size=max_batch_size,
                draft_length=draft_length,
                cache_gib=cache_gib,
                device=device,
                enable_prefix_caching=enable_prefix_caching,
                dtype=dtype,
            )
        with llm:
            gc.collect()
            gc.freeze()  # a full collection over the loaded model takes 0.2 s
            name = served_model_name or engine.resolve().name
            max_bytes = int(max_body_mib * 2**20)
            endpoints = Endpoints(llm.backend, name, max_waiting=max_waiting, max_body_bytes=max_bytes)
            set_up_logging()
            shown = f"[{host}]" if ":" in host else host
            click.echo(f"serving {name} on http://{shown}:{listening.getsockname()[1]}", err=True)
            app = make_app(endpoints, keys=keys, origins=allow_origin)
            asyncio.run(HttpServer(app, drain_seconds=drain_seconds).serve([listening]))
