# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_trt.runtime.server.disconnect import ClientDisconnected, cancel_on_disconnect
from dflash_trt.runtime.server.http_error import HttpError, to_http_error
from dflash_trt.runtime.server.responses_answer import ResponseEvent

DONE = b"data: [DONE]\n\n"
MAX_UNREAD_BYTES = 2**22
"""Most unread bytes of one response; beyond it, the response ends with an error."""
MAX_ALL_UNREAD_BYTES = 2**28
"""Most unread bytes of all responses."""


class EventStream(Response):
    """JSON documents as server-sent events.

    Unread documents are buffered within a bound, so that a slow client holds no slot of the decoder.
    """

    media_type = "text/event-stream"
    all_unread_bytes = 0
    """Unread bytes of all responses."""

    def __init__(self, events: AsyncGenerator[Any, None], headers: Mapping[str, str] | None = None) -> None:
        """Sends `events`; an exception becomes the last one."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._is_complete = False
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events, or stops when the client disconnects."""
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            scope["dflash_trt.log_fields"]["client"] = "disconnected"

    async def _send(self, send: Send) -> None:
        producer = asyncio.create_task(self._produce())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while self._unread or not self._is_complete:
                if self._unread:
                    event = self._unread.popleft()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    self._count(-len(event))
                else:
                    self._changed.clear()
                    await self._changed.wait()
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
            self._count(-self._unread_bytes)

    async def _produce(self) -> None:
        try:
            async with aclosing(self._events):
                async for document in self._events:
                    event = _event(document)
                    if not self._has_room(len(event)):
                        raise HttpError(503, f"the client is too slow: {self._unread_bytes} bytes are unread")
                    self._put(event)
        except Exception as error:
            self._put(_event(to_http_error(error).body()))
        finally:
            self._is_complete = True
            self._changed.set()

    def _has_room(self, size: int) -> bool:
        is_within = EventStream.all_unread_bytes + size <= MAX_ALL_UNREAD_BYTES
        return not self._unread or (is_within and self._unread_bytes + size <= MAX_UNREAD_BYTES)

    def _put(self, event: bytes) -> None:
        self._unread.append(event)
        self._count(len(event))
        self._changed.set()

    def _count(self, size: int) -> None:
        self._unread_bytes += size
        EventStream.all_unread_bytes += size


def _event(document: object) -> bytes:
    name = f"event: {document.type}\n" if isinstance(document, ResponseEvent) else ""
    return name.encode() + b"data: " + msgspec.json.encode(document) + b"\n\n"
