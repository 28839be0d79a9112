# SPDX-License-Identifier: Apache-2.0
"""Measures the server's resident memory, round by round, while hostile clients send requests.

The server runs on a fixture in a process of its own. A round sends --requests of each kind: streams that are cut in the
middle, unread streams, prompts far too long, bodies that are not JSON, a new JSON schema, and honest completions, or of
the --kind that is given. Sizes are read when nothing runs or waits any more. The first
--warm rounds fill the prefix cache; growth is counted from their end. Prints a table, asserts nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import httpx2

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.bench_slow_connections import at_work, completion, fixture_server  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402

AT_ONCE = 32
OPTIONS = ("--cache-gib", "0.05")  # the prefix cache is full when the first rounds are over
LONG_BYTES, BROKEN_BYTES = 5_000_000, 9_000_000
NUMBERS = itertools.count()


def body(**fields: object) -> dict[str, object]:
    return {"prompt": f"def f{next(NUMBERS)}(", "temperature": 0, "ignore_eos": True, "max_tokens": 150, **fields}


async def cut_stream(client: httpx2.AsyncClient) -> int:
    async with client.stream("POST", "/v1/completions", json=body(stream=True, n=4)) as response:
        async for _ in response.aiter_bytes():
            break
    return response.status_code


async def unread_stream(client: httpx2.AsyncClient) -> str:
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port, limit=1)
    writer.write(completion(**body(stream=True, n=4)))
    await writer.drain()
    await asyncio.sleep(0.5)
    writer.transport.abort()
    return "unread"


async def long_prompt(client: httpx2.AsyncClient) -> int:
    return (await client.post("/v1/completions", json=body(prompt="x y " * (LONG_BYTES // 4)))).status_code


async def broken_body(client: httpx2.AsyncClient) -> int:
    headers = {"content-type": "application/json"}
    content = b'{"prompt": "' * (BROKEN_BYTES // 12)
    return (await client.post("/v1/completions", content=content, headers=headers)).status_code


async def new_schema(client: httpx2.AsyncClient) -> int:
    names = [f"key{next(NUMBERS)}" for _ in range(8)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    fields = body(
        max_tokens=16,
        ignore_eos=False,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    return (await client.post("/v1/completions", json=fields)).status_code


async def honest(client: httpx2.AsyncClient) -> int:
    return (await client.post("/v1/completions", json=body(max_tokens=32))).status_code


KINDS = {
    kind.__name__.replace("_", "-"): kind
    for kind in (cut_stream, unread_stream, long_prompt, broken_body, new_schema, honest)
}


async def one_round(url: str, kinds: Sequence[str], requests: int) -> dict[str, int]:
    """Statuses, and how many answers had each."""
    limits, places = httpx2.Limits(max_connections=AT_ONCE), asyncio.Semaphore(AT_ONCE)
    statuses: dict[str, int] = {}
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def send(kind: str) -> None:
            async with places:
                try:
                    status = str(await KINDS[kind](client))
                except httpx2.TransportError:  # the server answers, and closes, before it has read all of the body
                    status = "closed"
            statuses[status] = statuses.get(status, 0) + 1

        await asyncio.gather(*(send(kind) for _ in range(requests) for kind in kinds))
        assert client.base_url.port is not None
        while await at_work(client.base_url.port):
            await asyncio.sleep(0.1)
    return statuses


def resident_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), default=list(KINDS))
@click.option("--rounds", default=200, show_default=True)
@click.option("--warm", default=20, show_default=True, help="Rounds before growth is counted.")
@click.option("--requests", default=8, show_default=True, help="Requests of each kind in a round.")
def main(kinds: tuple[str, ...], rounds: int, warm: int, requests: int) -> None:
    rows, base = [], 0.0
    with fixture_server(*OPTIONS) as process:
        url, begin = process.await_url(), time.monotonic()
        for number in range(1, rounds + 1):
            statuses = asyncio.run(one_round(url, kinds, requests))
            size = resident_mib(process.popen.pid)
            base = size if number <= warm else base
            if number != warm and number % max(1, rounds // 10):
                continue
            answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
            growth = f"{size / base - 1:+.1%}" if number > warm else ""
            rows.append((str(number), f"{time.monotonic() - begin:.0f}", f"{size:.0f}", growth, answers))
    title = f"{requests} requests of each of {len(kinds)} kinds a round, on {cpu_model()}"
    print_table(title, ("round", "s", "resident, MiB", "growth", "answers"), rows)


if __name__ == "__main__":
    main()
