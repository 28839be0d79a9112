# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_trt.runtime.server.answer.responses_answer import ResponseEvent
from dflash_trt.runtime.server.connections.protocol import WRITE_BODY
from dflash_trt.runtime.server.disconnect import ClientDisconnected, cancel_on_disconnect
from dflash_trt.runtime.server.http_error import HttpError, to_http_error

DONE = b"data: [DONE]\n\n"
MAX_UNREAD_BYTES = 2**22
"""Most unread bytes of one response; beyond it, the response ends with an error."""
MAX_ALL_UNREAD_BYTES = 2**28
"""Most unread bytes of all responses."""
ENCODER = msgspec.json.Encoder()


class EventStream(Response):
    """JSON documents as server-sent events.

    A document is written at once; while the client does not read, documents wait within a bound, so that it holds no
    slot of the decoder.
    """

    media_type = "text/event-stream"
    all_unread_bytes = 0
    """Unread bytes of all responses."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._held = ExitStack()
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._error: Exception | None = None
        self._is_complete = False
        self._changed = asyncio.Event()
        self._is_waiting = False
        """Whether all documents so far are sent, and `_send` waits for the next one."""
        self._write: Callable[[bytes], bool] = lambda event: False

    def put(self, document: object) -> None:
        """Sends a document, without waiting for the client."""
        if self._is_complete:
            return
        event = _event(document)
        if self._is_waiting and self._write(event):
            return
        self._is_waiting = False
        is_within = self.all_unread_bytes + len(event) <= MAX_ALL_UNREAD_BYTES
        if self._unread and not (is_within and self._unread_bytes + len(event) <= MAX_UNREAD_BYTES):
            self.end(HttpError(503, f"the client is too slow: {self._unread_bytes} bytes are unread"))
            return
        self._unread.append(event)
        self._count(len(event))
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after what has been put; an error becomes its last event."""
        if self._is_complete:
            return
        self._is_complete, self._error = True, error
        self._changed.set()
        self._release()

    def hold(self, held: ExitStack) -> None:
        """Leaves `held` when the last document has come, read or not, or the client has gone."""
        self._held = held
        if self._is_complete:
            self._release()

    async def begin(self) -> None:
        """Waits for the first event; raises an error that comes before it, so that the response has its status."""
        try:
            await self._changed.wait()
            if self._error is not None and not self._unread:
                raise self._error
        except BaseException:
            self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events, or stops when the client disconnects."""
        self._write = scope.get(WRITE_BODY, self._write)
        try:
            with self._held:
                await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            scope["dflash_trt.log_fields"]["client"] = "disconnected"
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._unread or not self._is_complete:
            if self._unread:
                events, size = b"".join(self._unread), self._unread_bytes
                self._unread.clear()
                await send({"type": "http.response.body", "body": events, "more_body": True})
                self._count(-size)
            else:
                self._changed.clear()
                self._is_waiting = True
                await self._changed.wait()
        last = DONE if self._error is None else _event(to_http_error(self._error).body()) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _count(self, size: int) -> None:
        self._unread_bytes += size
        EventStream.all_unread_bytes += size

    def _release(self) -> None:
        error = self._error
        self._held.__exit__(None if error is None else type(error), error, None)

    def _close(self) -> None:
        self._is_complete = True
        self._count(-self._unread_bytes)


def _event(document: object) -> bytes:
    name = f"event: {document.type}\n".encode() if isinstance(document, ResponseEvent) else b""
    return b"%bdata: %b\n\n" % (name, ENCODER.encode(document))
