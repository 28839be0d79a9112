# SPDX-License-Identifier: Apache-2.0
"""Measures the latency of honest requests while slow and idle clients hold connections.

The server runs on a fixture in a process of its own. Four clients ask for --tokens tokens one request after another, in
rounds: without held connections, then with --held of one kind, of each kind in turn. A row is the median round of its
kind: p50 and p99 of the honest requests' times, and both as ratios to the rounds without in the same run.
Prints a table, asserts nothing; takes three minutes. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from pathlib import Path

import click
import numpy as np

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402
from tests.runtime.server.live import Process, started  # noqa: E402

CLIENTS = 4
SLOW_CLIENT = "127.0.0.2"  # places are counted by address
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def completion(**body: object) -> bytes:
    encoded = json.dumps({"prompt": "def f(", "temperature": 0, "ignore_eos": True, **body}).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(encoded) + encoded


STREAM = completion(max_tokens=150, n=4, stream=True)
KINDS = {
    "idle": b"",
    "kept alive": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "slow headers": HEAD + b"x-slow: ",
    "slow body": HEAD + b'content-length: 1000\r\n\r\n{"prompt": "',
    "never read": STREAM,
    "never read, n=16": completion(max_tokens=150, n=16, stream=True),  # most of them get 429
    "endless grammar": completion(max_tokens=4, ignore_eos=False, structured_outputs={"regex": "a?" * 5000}),
}


@asynccontextmanager
async def held(port: int, kind: str | None, number: int) -> AsyncIterator[None]:
    """Connections that send the beginning of `kind`, and neither read nor send more."""
    if kind is None:
        yield
        return
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1, local_addr=(SLOW_CLIENT, 0))
        writer.write(KINDS[kind])
        await writer.drain()
        writers.append(writer)
    while await at_work(port):  # their answers are computed first: only reading is slow
        await asyncio.sleep(0.1)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def at_work(port: int) -> bool:
    """Whether requests run or wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return any(float(count) for count in re.findall(r"vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", text))


async def honest(port: int, requests: int, tokens: int) -> list[float]:
    """Seconds of each request of CLIENTS clients, each on a connection of its own."""

    async def ask() -> float:
        begin = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion(max_tokens=tokens).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise click.ClickException(f"an honest request was refused: {answer[:100]!r}")
        return time.perf_counter() - begin

    async def client() -> list[float]:
        return [await ask() for _ in range(requests // CLIENTS)]

    return list(chain.from_iterable(await asyncio.gather(*(client() for _ in range(CLIENTS)))))


async def one_round(port: int, kind: str | None, number: int, requests: int, tokens: int) -> tuple[float, float]:
    async with held(port, kind, number):
        p50, p99 = np.percentile(await honest(port, requests, tokens), [50, 99])
    return float(p50), float(p99)


@contextmanager
def fixture_server(*options: str) -> Iterator[Process]:
    """`dflash-trt serve` on the qwen3 fixture, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        engine, target = Path(directory) / "engine", FIXTURES / "tiny-qwen3"
        build(FIXTURES / "tiny-qwen3-dflash", engine, target)
        with started(engine, target, Path(directory) / "log", *options) as process:
            yield process


@click.command()
@click.option("--held", "number", default=64, show_default=True, help="Connections held at once.")
@click.option("--requests", default=200, show_default=True, help="Honest requests of a round.")
@click.option("--tokens", default=16, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of each kind.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), default=list(KINDS))
def main(number: int, requests: int, tokens: int, rounds: int, kinds: tuple[str, ...]) -> None:
    measured: dict[str | None, list[tuple[float, float]]] = {kind: [] for kind in (None, *kinds)}
    with fixture_server() as process:
        port = int(process.await_url().rpartition(":")[2])
        asyncio.run(honest(port, requests, tokens))  # warm
        for _ in range(rounds):
            for kind, values in measured.items():
                values.append(asyncio.run(one_round(port, kind, number, requests, tokens)))
    base = [statistics.median(column) for column in zip(*measured[None], strict=True)]
    rows = []
    for kind, values in measured.items():
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        ratios = (f"{median / alone:.2f}x" for median, alone in zip(medians, base, strict=True))
        rows.append((kind or "none", *(f"{median * 1e3:.1f}" for median in medians), *ratios))
    columns = (f"{number} connections held", "p50, ms", "p99, ms", "p50 / none", "p99 / none")
    print_table(f"{CLIENTS} clients, {tokens} tokens a request, on {cpu_model()}", columns, rows)


if __name__ == "__main__":
    main()
