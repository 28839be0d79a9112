# SPDX-License-Identifier: Apache-2.0
"""uvicorn with a bound socket, a header timeout, and a graceful shutdown at SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.errors import RequestError

HEADER_SECONDS = 30.0
"""Time limit for the headers of a connection's first request."""
DRAIN_SECONDS = 60
"""Time limit for running requests after SIGTERM."""
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; RequestError where the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"--host: expected an address of this machine, found {host}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise RequestError(
            f"--port: expected a free port on {host}, found {port}: {error.strerror}",
            hint="stop the process that listens there, or choose another port with --port",
        ) from None
    return bound


class Protocol(H11Protocol):
    """HTTP/1.1 with a time limit for request headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._header_timer.cancel()
        super().connection_lost(exc)

    def _time_out(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Drains at SIGTERM and SIGINT; ends at once at the second signal."""

    def __init__(self, app: ASGIApp, *, drain_seconds: int = DRAIN_SECONDS) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=drain_seconds,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handlers while it serves; unlike uvicorn, does not raise a handled signal again."""
        is_main = threading.current_thread() is threading.main_thread()  # only that receives signals
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def set_up_logging() -> None:
    """The access log and errors on stderr, with the time; only errors of uvicorn."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in (("dflash_trt.server", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
