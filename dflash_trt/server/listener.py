# SPDX-License-Identifier: Apache-2.0
"""Work that ends with whoever waits for it: answers as server-sent events, or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_trt.runtime.backend import Chunk
from dflash_trt.server.http_refusal import refusal_of

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class GoneError(Exception):
    """Nobody waits any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; where the connection ends before it, it is cancelled, and GoneError raised.

    The body must have been received.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Documents as server-sent events, each sent when it is there and the reader has taken those before."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        """An error of `events` becomes the last event."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the end, or until nobody listens."""
        try:
            await unless_gone(receive, self._send(send))
        except GoneError:
            scope["dflash_trt.note"]["ended"] = "by the client"

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        except Exception as error:
            body = _event(refusal_of(error).body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def merged(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of all, with the number of their stream, as they come; closing it closes all."""
    queue: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].completion is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
