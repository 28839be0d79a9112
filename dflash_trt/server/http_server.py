# SPDX-License-Identifier: Apache-2.0
"""uvicorn under our rules: a port that is taken is one error, half-sent requests end, and SIGTERM drains."""

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
"""For the headers of a connection's first request to arrive."""
DRAIN_SECONDS = 60
"""That running answers have after SIGTERM."""
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; RequestError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"--host: expected an address of this machine, found {host}: {error.strerror}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise RequestError(
            f"--port: expected a free port on {host}, found {port}: {error.strerror}",
            hint="end what listens there, or choose another with --port",
        ) from None
    return made


class Protocol(H11Protocol):
    """HTTP/1.1 whose connections end when no request comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._header_timer.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Drains at SIGTERM and SIGINT; at a second one it ends at once."""

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
        """Only while it serves; a signal that ended it in good order is not raised again."""
        is_main = threading.current_thread() is threading.main_thread()  # no other hears signals
        wanted = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def set_up_logging() -> None:
    """Our lines on stderr, with the time; of uvicorn's what is wrong only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in (("dflash_trt.server", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
