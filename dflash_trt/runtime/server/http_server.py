# SPDX-License-Identifier: Apache-2.0
"""uvicorn with time limits for headers and writes, bounded connections, and a graceful shutdown at SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.log import log

HEADER_SECONDS = 30.0
"""Time limit for the headers of a request, from the connection or the first byte of the next request."""
KEEP_ALIVE_SECONDS = 75
"""Time limit for a connection between requests, as nginx's: longer than clients and load balancers keep one (httpx 5 s,
AWS 60 s), so that they close it, and no request arrives at a closing connection."""
WRITE_SECONDS = 60.0
"""Time limit for a client that does not read; then its connection is reset."""
DRAIN_SECONDS = 60
"""Time limit for running requests after SIGTERM."""
ERROR_SECONDS = 5
"""Time limit for error responses to the requests that are left then."""
SMALL_CHUNKS = 1024
CHUNK_BYTES = 256
"""Smallest mean size of a body's chunks after the first SMALL_CHUNKS; each takes 20 us, whatever its size."""
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16384
"""Most header bytes of a request, as in Apache and h11; each header takes 2 us of the event loop."""
HEADERS_END = re.compile(rb"\n\r?\n")
LAST_CHUNK = re.compile(rb"\r?\n?0+[;\s]")
"""Size line of the last chunk, before the trailers."""
LAST_CHUNK_BYTES = 23
"""Longest match of LAST_CHUNK: h11 0.16 takes at most 20 digits."""
ACCEPT_RETRY_SECONDS = 0.5
BACKLOG = 2048
RESERVED_FILES = 16
"""File descriptors kept free for the page and for logs."""
MIN_CONNECTIONS = 8
HOST_HINT = "127.0.0.1 is reached from this machine alone, 0.0.0.0 is every address of it"


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet; RequestError where the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(
            f"--host: expected an address of this machine, found {host}: {error.strerror}", hint=HOST_HINT
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise RequestError(f"--host: expected an address of this machine, found {host}", hint=HOST_HINT) from None
        raise RequestError(
            f"--port: expected a free port on {host}, found {port}: {error.strerror}",
            hint="stop the process that listens there, or choose another port with --port",
        ) from None
    return bound


def max_connections() -> int:
    """Connections that the limit of open files allows; raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    limit = hard - num_open - RESERVED_FILES
    if limit < MIN_CONNECTIONS:
        raise RequestError(
            f"open files: expected a limit of at least {num_open + RESERVED_FILES + MIN_CONNECTIONS}, found {hard}",
            hint="raise it with ulimit -n",
        )
    return limit


class Connection(h11.Connection):
    """HTTP/1.1 state machine that refuses many headers or trailers, and bodies in many small chunks."""

    refusal: str | None = None
    _num_chunks = _num_bytes = 0
    _is_chunk_next = _is_trailer_next = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event in the received bytes."""
        if self._is_chunk_next and not self._is_trailer_next:
            start = self._receive_buffer._data[:LAST_CHUNK_BYTES]  # trailing_data copies all received bytes
            self._is_trailer_next = LAST_CHUNK.match(start) is not None
        if self.their_state is h11.IDLE or self._is_trailer_next:
            self._check_headers(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            self._is_chunk_next = any(name == b"transfer-encoding" for name, _ in event.headers)
        elif isinstance(event, h11.Data):
            self._is_chunk_next = event.chunk_end
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > SMALL_CHUNKS + self._num_bytes // CHUNK_BYTES:
                expected = f"chunks of at least {CHUNK_BYTES} bytes"
                self._refuse(f"body: expected {expected}, found {self._num_chunks} in {self._num_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            self._is_chunk_next = self._is_trailer_next = False
        return event

    def _check_headers(self, received: bytes) -> None:
        """Checks headers or trailers before they are parsed, which takes time."""
        if len(received) <= MAX_HEADER_BYTES and received.count(b"\n") <= MAX_HEADERS:
            return
        lines = HEADERS_END.split(received, 1)[0]
        number = lines.count(b"\n")  # the first line is the request's, or a chunk's
        if len(lines) > MAX_HEADER_BYTES or number > MAX_HEADERS:
            expected = f"at most {MAX_HEADERS} in {MAX_HEADER_BYTES} bytes"
            self._refuse(f"headers: expected {expected}, found {number} in {len(lines)} bytes")

    def _refuse(self, message: str) -> NoReturn:
        self.refusal = message
        raise h11.RemoteProtocolError(message)


class Protocol(H11Protocol):
    """HTTP/1.1 with time limits for request headers and for clients that do not read."""

    conn: Connection
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of uvicorn's class."""
        super().__init__(*arguments, **options)
        self.conn = Connection(h11.SERVER)

    def send_400_response(self, msg: str) -> None:
        """Sends our reason for a refusal if there is one; closes the connection if a response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the header timer."""
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_header_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Starts the header timer at the first byte of a next request."""
        if not self._is_responding and self._header_timer is None:
            self._start_header_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stops the header timer once a request's headers are complete."""
        super().handle_events()
        if self._is_responding:
            self._stop_header_timer()

    def pause_writing(self) -> None:
        """Starts the write timer."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the write timer."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    @property
    def idle_until(self) -> float | None:
        """Time on the event loop's clock at which an idle connection closes; None during a request."""
        timer = self.timeout_keep_alive_task
        return None if timer is None else timer.when()

    def close_idle(self) -> None:
        """Closes an idle connection now."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_handler()

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_out(self) -> None:
        if not self._is_responding and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class Acceptor:
    """Accepts connections up to a limit, at which it closes idle ones; replaces asyncio.Server.

    asyncio's own (CPython 3.11) logs and retries BACKLOG times at once when file descriptors run out.
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
        """Stops accepting."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Waits for the accept loop to end."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if len(self._connections) >= self._limit:
                if idle := [each for each in self._connections if each.idle_until]:
                    min(idle, key=lambda each: each.idle_until or 0.0).close_idle()
                    await asyncio.sleep(0)
                else:
                    await self._wait(f"{self._limit} connections are open, the limit of open files")
                continue
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # out of file descriptors or memory
                await self._wait(error.strerror or str(error))
                continue
            self._is_full = False
            try:
                await loop.connect_accepted_socket(self._make_protocol, connection)
            except OSError:
                connection.close()

    async def _wait(self, reason: str) -> None:
        """Waits; logs the reason once, until a connection is accepted again."""
        if not self._is_full:
            log.error("new connections wait: %s", reason)
        self._is_full = True
        await asyncio.sleep(ACCEPT_RETRY_SECONDS)


class HttpServer(uvicorn.Server):
    """Drains at SIGTERM and SIGINT; the second signal ends the process at once."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_seconds: int = DRAIN_SECONDS,
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
        """Listens on `sockets`."""
        await self.lifespan.startup()

        def make_protocol() -> asyncio.Protocol:
            return Protocol(config=self.config, server_state=self.server_state, app_state={})

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
        """Shuts down; at the second signal the process ends."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while it serves; unlike uvicorn, does not raise a handled signal again."""
        is_main = threading.current_thread() is threading.main_thread()  # only that receives signals
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
