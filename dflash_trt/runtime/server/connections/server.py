# SPDX-License-Identifier: Apache-2.0
"""The server around an ASGI application, from its start to its end at SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from dflash_trt.runtime.server.connections.acceptor import BACKLOG, Acceptor
from dflash_trt.runtime.server.connections.protocol import Protocol

KEEP_ALIVE_SECONDS = 75
"""Time limit for a connection between requests, as nginx's: longer than clients and load balancers keep one (httpx 5 s,
AWS 60 s), so that they close it, and no request arrives at a closing connection."""
ERROR_SECONDS = 5
"""Time limit for error responses to the requests that are left then."""


class HttpServer(uvicorn.Server):
    """Drains at SIGTERM and SIGINT; the second signal ends the process at once."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_seconds: int,
        is_alive: Callable[[], bool] = lambda: True,
        cancel_all: Callable[[], None] = lambda: None,
        connection_limit: int = BACKLOG,
    ) -> None:
        """Exits when `is_alive` returns False; calls `cancel_all` to end requests that run after `drain_seconds`."""
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
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds + ERROR_SECONDS,
            )
        )
        self._drain_seconds = drain_seconds
        self._is_alive = is_alive
        self._cancel_all = cancel_all
        self._connection_limit = connection_limit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make_protocol = partial(Protocol, config=self.config, server_state=self.server_state, app_state={})
        connections = cast("set[Protocol]", self.server_state.connections)
        self.servers = [
            Acceptor(listening, make_protocol, connections, self._connection_limit)  # type: ignore[misc]
            for listening in sockets or []
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to shut down."""
        return await super().on_tick(counter) or not self._is_alive()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for running requests, then cancels them, so that each client gets an error response."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain_seconds, lambda: loop.run_in_executor(None, self._cancel_all))
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Shuts down, and unlike uvicorn's exits with 0; at the second signal the process ends."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Ends the process with 0 at SIGTERM, while there is no request to drain.

    Without an exception: one that a handler raises inside a finaliser is lost.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGTERM, before)
