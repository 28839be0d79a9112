# SPDX-License-Identifier: Apache-2.0
"""Measures the latency of honest clients next to two that send bodies of many values, levels or chunks, or many
headers.

The server runs on a fixture in a process of its own. Four clients ask for --tokens tokens one request after another,
alone and beside two that send one body of a kind after another, of each kind in turn. Prints a table, asserts nothing;
takes two minutes. Run it on a machine that does nothing else: the hostile clients' own work is in the figures, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.bench_slow_connections import CLIENTS, HEAD, SLOW_CLIENT, fixture_server, honest  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402

NUM_HOSTILE = 2
CLOSING = HEAD + b"connection: close\r\n"


def sent(path: str = "completions", **body: Any) -> bytes:
    encoded = json.dumps({"prompt": "x"} | body if path == "completions" else body).encode()
    head = CLOSING.replace(b"/v1/completions", b"/v1/%b" % path.encode())
    return head + b"content-length: %d\r\n\r\n" % len(encoded) + encoded


KINDS: dict[str, Callable[[], bytes]] = {
    "one text, 14 MB": lambda: sent(prompt="x " * 7_000_000),
    "a million texts": lambda: sent(stop=["a"] * 1_000_000),
    "a million lists": lambda: sent(prompt=[[1]] * 1_000_000),
    "half a million fields": lambda: sent("completions", **{f"f{i}": 1 for i in range(500_000)}),
    "half a million variables": lambda: sent(
        "chat/completions",
        messages=[{"role": "user", "content": "x"}],
        chat_template_kwargs={f"f{i}": 1 for i in range(500_000)},
    ),
    "64 long stop texts": lambda: sent(stop=[" " * 1023 + "!"] * 64, max_tokens=500, ignore_eos=True, stream=True),
    "6,000 headers": lambda: CLOSING + b"x: y\r\n" * 6000 + b"content-length: 2\r\n\r\n{}",
    "6,000 trailers": lambda: CLOSING + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 6000 + b"\r\n",
    "chunks of one byte": lambda: CLOSING + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1_000_000,
}


@asynccontextmanager
async def beside(port: int, kind: str | None) -> AsyncIterator[None]:
    """Hostile clients, each with one request of `kind` after another."""

    body = KINDS[kind]() if kind else b""

    async def client() -> None:
        while body:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(SLOW_CLIENT, 0))
            with suppress(ConnectionError):
                writer.write(body)
                await writer.drain()
                await reader.read()
            writer.transport.abort()

    clients = [asyncio.create_task(client()) for _ in range(NUM_HOSTILE)]
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def measure(port: int, kind: str | None, requests: int, tokens: int) -> list[float]:
    async with beside(port, kind):
        return await honest(port, requests, tokens)


@click.command()
@click.option("--requests", default=100, show_default=True, help="Honest requests beside each kind.")
@click.option("--tokens", default=16, show_default=True, help="Tokens of each answer.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), default=list(KINDS))
def main(requests: int, tokens: int, kinds: tuple[str, ...]) -> None:
    rows, alone = [], None
    with fixture_server() as process:
        port = int(process.await_url().rpartition(":")[2])
        asyncio.run(honest(port, requests, tokens))  # warm
        for kind in (None, *kinds):
            measured = np.percentile(asyncio.run(measure(port, kind, requests, tokens)), [50, 99])
            alone = measured if alone is None else alone
            ratios = (f"{ratio:.1f}x" for ratio in measured / alone)
            rows.append((kind or "none", *(f"{seconds * 1e3:.1f}" for seconds in measured), *ratios))
    columns = (f"{NUM_HOSTILE} hostile clients", "p50, ms", "p99, ms", "p50 / none", "p99 / none")
    print_table(f"{CLIENTS} clients, {tokens} tokens a request, on {cpu_model()}", columns, rows)


if __name__ == "__main__":
    main()
