# SPDX-License-Identifier: Apache-2.0
"""Throughput of one, two and four workers of NVIDIA Dynamo's on one machine, shared with their frontend and clients.

A frontend and its workers, one thread each, run for every count at once; rounds of the same requests go to each in
turn. A row is the median of its rounds: tokens a second, as a ratio to one worker, and the median seconds of a request.
Needs `make dynamo`. Prints a table, asserts nothing; takes three minutes. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click
import httpx2

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402
from tests.runtime.dynamo.cluster import Cluster, cluster  # noqa: E402
from tests.waiting import PATIENCE  # noqa: E402

COUNTS = (1, 2, 4)


async def one_round(running: Cluster, clients: int, requests: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of all, and the median seconds of a request."""
    waiting = iter([f"def f{index}(x, y):" for index in range(requests)])
    seconds: list[float] = []

    async def client(connection: httpx2.AsyncClient) -> None:
        for prompt in waiting:
            begin = time.perf_counter()
            body = running.body(prompt, max_tokens=tokens)
            answer = await connection.post(f"{running.url}/v1/completions", json=body)
            if answer.is_error:
                raise click.ClickException(f"a request failed with {answer.status_code}: {answer.text[:100]}")
            seconds.append(time.perf_counter() - begin)

    async with httpx2.AsyncClient(timeout=PATIENCE) as connection:
        begin = time.perf_counter()
        await asyncio.gather(*(client(connection) for _ in range(clients)))
        return requests * tokens / (time.perf_counter() - begin), statistics.median(seconds)


@click.command()
@click.option("--clients", default=32, show_default=True, help="Requests at once.")
@click.option("--requests", default=192, show_default=True, help="Requests in a round.")
@click.option("--tokens", default=150, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", default=5, show_default=True, help="For each number of workers.")
def main(clients: int, requests: int, tokens: int, rounds: int) -> None:
    target = FIXTURES / "tiny-qwen3"
    measured: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        build(FIXTURES / "tiny-qwen3-dflash", directory / "engine", target)
        running = {}
        for count in COUNTS:
            place = directory / str(count)
            place.mkdir()
            running[count] = stack.enter_context(cluster(place, directory / "engine", target))
            running[count].add_workers(count)
            asyncio.run(one_round(running[count], clients, clients, tokens))  # warm
        for _ in range(rounds):
            for count, values in measured.items():
                values.append(asyncio.run(one_round(running[count], clients, requests, tokens)))
    medians = {count: [statistics.median(column) for column in zip(*measured[count], strict=True)] for count in COUNTS}
    rows = [
        (str(count), f"{speed:,.0f}", f"{speed / medians[1][0]:.2f}x", f"{seconds:.2f}")
        for count, (speed, seconds) in medians.items()
    ]
    title = f"{clients} clients, {tokens} tokens a request, on {os.cpu_count()} cores of {cpu_model()}"
    print_table(title, ("workers", "tokens/s", "to one", "s a request"), rows)


if __name__ == "__main__":
    main()
