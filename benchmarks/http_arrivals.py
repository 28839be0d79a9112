# SPDX-License-Identifier: Apache-2.0
"""Sends streamed completions at given times and notes when each chunk came: a process of its own, as light as can be.

    python benchmarks/http_arrivals.py HOST PORT < plan.json > answers.json

The plan is a list of [seconds after the start, body]; of each answer it gives the time from sending to every event, and
the last event. A client that shared an interpreter with whoever measures would be measured, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def ask(host: str, port: int, begin: float, at: float, body: object) -> dict[str, object]:
    """One request on a connection of its own."""
    await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
    payload = json.dumps(body).encode()
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head.encode() + f"content-length: {len(payload)}\r\n\r\n".encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"expected 200, found {status!r}: {await reader.read()!r}")
    times, last = [], b""
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - sent)
            last = line
    writer.close()
    return {"times": times, "last": json.loads(last.removeprefix(b"data: "))}


async def main(host: str, port: int) -> None:
    """Sends all of the plan."""
    plan = json.load(sys.stdin)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(host, port, begin, at, body) for at, body in plan))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
