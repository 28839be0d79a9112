# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP/1.1 protocol with time limits for request headers and for clients that do not read."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.runtime.server.connections.parser import LimitedConnection, Refusal

HEADER_SECONDS = 30.0
"""Time limit for the headers of a request, from the connection or the first byte of the next request."""
WRITE_SECONDS = 60.0
"""Time limit for a client that does not read; then its connection is reset."""

WRITE_BODY = "dflash_trt.write_body"
"""Key of `Protocol.write_body` in an ASGI scope."""


class Protocol(H11Protocol):
    """A connection."""

    conn: LimitedConnection
    _header_timer: asyncio.TimerHandle
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = LimitedConnection()

    @property
    def idle_until(self) -> float | None:
        """Time on the event loop's clock at which an idle connection closes; None during a request."""
        timer = self.timeout_keep_alive_task
        return None if timer is None else timer.when()

    def close_idle(self) -> None:
        """Closes an idle connection now."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Sends the reason of a Refusal, else `msg`; only closes the connection where a response has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        error = sys.exception()  # uvicorn calls this while it handles the error
        super().send_400_response(str(error) if isinstance(error, Refusal) else msg)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time limit for headers."""
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops both timers."""
        self._header_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Starts the time limit for headers at the first byte of a next request."""
        if not self._is_responding and self._header_timer.cancelled():
            self._start_header_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stops that limit once a request's headers are complete; its scope then has `write_body`."""
        super().handle_events()
        if self._is_responding:
            self._header_timer.cancel()
            self.scope[WRITE_BODY] = self.write_body  # type: ignore[literal-required]

    def write_body(self, part: bytes) -> bool:
        """Writes a part of a body without a length, and needs no task; False where the client must read before.

        h11 keeps no count of such a body, so its chunk is written here at a sixth of the cost.
        """
        if self.flow.write_paused or self.cycle.disconnected or self.transport.is_closing():
            return False
        is_chunked = self.conn.their_http_version == b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
        return True

    def pause_writing(self) -> None:
        """Starts the time limit for the client to read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops that limit."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def _time_out(self) -> None:
        if not self._is_responding and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
