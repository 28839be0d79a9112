# SPDX-License-Identifier: Apache-2.0
"""Streams to clients that read slowly, leave, or do not read at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dflash_trt.runtime.server import event_stream
from dflash_trt.runtime.server.event_stream import EventStream
from tests.runtime.server.live import bounded


async def documents(number: int, ended: list[int]) -> AsyncGenerator[dict[str, Any], None]:
    try:
        for i in range(number):
            yield {"index": i, "text": "x" * 1000}
            await asyncio.sleep(0)
    finally:
        ended.append(1)


async def read_slowly(number: int, *, ticks: int = 0) -> tuple[bool, bytes]:
    """Whether the documents came to an end before the client read any, and what it got then.

    With `ticks` it reads meanwhile: one document every `ticks` turns of the event loop.
    """
    ended: list[int] = []
    may_read, sent = asyncio.Event(), b""

    async def send(message: Any) -> None:
        nonlocal sent
        await may_read.wait()
        for _ in range(ticks):
            await asyncio.sleep(0)
        sent += message.get("body", b"")

    async def receive() -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()

    if ticks:
        may_read.set()
    response = asyncio.create_task(EventStream(documents(number, ended))({"dflash_trt.log_fields": {}}, receive, send))
    for _ in range(10 * number):
        await asyncio.sleep(0)
    is_computed = bool(ended)
    may_read.set()
    await response
    return is_computed, sent


@pytest.mark.parametrize("limit", [None, "MAX_UNREAD_BYTES", "MAX_ALL_UNREAD_BYTES"])
def test_an_unread_response(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its place back, and is cut at a limit."""
    if limit is not None:
        monkeypatch.setattr(event_stream, limit, 10_000)
    is_computed, sent = asyncio.run(read_slowly(50))
    assert is_computed
    assert sent.count(b'"index"') == 50 if limit is None else sent.count(b'"index"') < 11
    assert (b"the client is too slow" in sent) == (limit is not None)
    assert sent.endswith(b"data: [DONE]\n\n")
    assert EventStream.all_unread_bytes == 0


def test_what_was_read_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the documents are unread when the last one comes: fewer bytes than the limit, as all are more."""
    monkeypatch.setattr(event_stream, "MAX_UNREAD_BYTES", 40_000)
    assert asyncio.run(read_slowly(50, ticks=2))[1].count(b'"index"') == 50


@bounded
async def test_a_client_that_leaves_is_not_counted_any_more() -> None:
    ended: list[int] = []

    async def send(message: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, str]:
        while not ended:
            await asyncio.sleep(0)
        assert EventStream.all_unread_bytes > 50_000
        return {"type": "http.disconnect"}

    await EventStream(documents(50, ended))({"dflash_trt.log_fields": {}}, receive, send)
    assert EventStream.all_unread_bytes == 0
