# SPDX-License-Identifier: Apache-2.0
"""Accepts connections up to a limit, in the place of asyncio.Server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection

from dflash_trt.runtime.server.connections.protocol import Protocol
from dflash_trt.runtime.server.telemetry.log import log

BACKLOG = 2048
ACCEPT_RETRY_SECONDS = 0.5


class Acceptor:
    """Closes the connection that has been idle longest to accept one beyond the limit; without an idle one, waits.

    uvicorn's own limit counts idle ones: findings/uvicorn_limit_concurrency_of_one_serves_nothing.sh.
    asyncio's own (CPython 3.13) logs and retries BACKLOG times at once when file descriptors run out.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[Protocol],
        limit: int,
    ) -> None:
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._listening = listening
        self._make_protocol = make_protocol
        self._connections = connections
        self._limit = limit
        self._is_full = False
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Waits for the accept loop to end."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._make_room()
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # out of file descriptors or memory
                await self._wait(error.strerror or str(error))
                continue
            self._is_full = False
            try:
                await loop.connect_accepted_socket(self._make_protocol, connection)
            except OSError:
                connection.close()

    async def _make_room(self) -> None:
        while len(self._connections) >= self._limit:
            if idle := {each.idle_until: each for each in self._connections if each.idle_until is not None}:
                idle[min(idle)].close_idle()
                await asyncio.sleep(0)
            else:
                await self._wait(f"{self._limit} connections are open, the limit of open files")

    async def _wait(self, reason: str) -> None:
        """Waits; logs the reason once, until a connection is accepted again."""
        if not self._is_full:
            log.error("new connections wait: %s", reason)
        self._is_full = True
        await asyncio.sleep(ACCEPT_RETRY_SECONDS)
