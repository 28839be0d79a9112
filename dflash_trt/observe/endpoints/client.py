# SPDX-License-Identifier: Apache-2.0
"""Requests to an untrusted server, bounded in time and size, with one error class."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflash_trt.errors import ConfigError, EndpointError, shown
from dflash_trt.files.json_file import json_object
from dflash_trt.files.read import read_text
from dflash_trt.observe.endpoints.answer_stream import Answer, AnswerReader, events

if TYPE_CHECKING:
    import ssl

    import httpx2


MAX_KEY_BYTES = 2**16
SLOW_HINT = "is it overloaded? --seconds gives it more time"
MAX_PAGE_BYTES = 64 * 2**20  # bytes of an unstreamed answer: /metrics of a large deployment has several MiB
MAX_ERROR_BYTES = 64 * 2**10
CONNECT_SECONDS = 10.0
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_api_key(file: Path | None) -> str | None:
    """The first line that is neither empty nor a comment; raises ConfigError if there is no key."""
    if file is None:
        return None
    lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEY_BYTES).splitlines()]
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{file}: no API key in it")
    return key


def too_late(where: str) -> EndpointError:
    return EndpointError(f"{where}: no answer before the time was up", hint=SLOW_HINT)


def refusal(where: str, status: int, body: bytes) -> EndpointError:
    """The error for an answer other than 200."""
    hint = None
    if status in (401, 403):
        hint = "give the server's key with --api-key-file"
    elif status == 404:
        hint = "is this the address of an OpenAI-compatible server, without a path behind /v1?"
    elif 300 <= status < 400:
        hint = "redirections are not followed: give the address that it points to"
    message = body.decode(errors="replace").strip()
    return EndpointError(f"{where}: expected 200, found {status}: {shown(message)}", hint=hint, status=status)


def unreachable(where: str, error: httpx2.HTTPError) -> EndpointError:
    import httpx2

    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return EndpointError(f"{where}: no server answered in time", hint="is it running?")
    if isinstance(error, httpx2.TimeoutException):
        return EndpointError(f"{where}: timed out waiting for an answer", hint="is it overloaded?")
    if isinstance(error, httpx2.ConnectError):
        message = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or "no connection"
        hint = "is it running, and is the port right?"
        if _is_unknown_host(error):
            hint = "is the host's name right, and can this machine resolve it?"
        elif "SSL" in message or "CERTIFICATE" in message.upper():
            hint = "is it https? Its certificate must be trusted here (SSL_CERT_FILE names others)"
        return EndpointError(f"cannot connect to {where}: {message}", hint=hint)
    return EndpointError(f"{where}: the answer broke off: {str(error) or type(error).__name__}")


def _is_unknown_host(error: BaseException | None) -> bool:
    """Searches the chain of causes, the only place where httpx2 keeps the resolver's error."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


@cache
def _certificates(trust_env: bool) -> ssl.SSLContext:
    """Trusted certificates; all clients share them, because reading them takes 25 ms."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=trust_env)


class Client(AbstractContextManager["Client", None]):
    """One server; use it as a context manager. Thread-safe."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 60.0, deadline_seconds: float | None = None
    ) -> None:
        """`url` with or without /v1; `timeout`: seconds for a connection, and for each wait for bytes.

        `deadline_seconds` from now every connection is closed, and requests raise EndpointError. Raises EndpointError
        unless it is an http(s) URL.
        """
        import httpx2

        self.url = base_url(url)
        host = urlsplit(self.url).hostname
        headers = {"accept-encoding": "identity"}  # a limit on bytes then limits memory
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._deadline = math.inf if deadline_seconds is None else time.monotonic() + deadline_seconds
        self._sockets: list[socket.socket] = []
        self._cutter = None if deadline_seconds is None else threading.Timer(deadline_seconds, self._cut)
        if self._cutter is not None:
            self._cutter.daemon = True
            self._cutter.start()
        self._timeout = timeout
        trust_env = host not in LOOPBACK  # no proxy between us and this machine
        self._http = httpx2.Client(
            base_url=self.url,
            headers=headers,
            limits=httpx2.Limits(max_connections=None),
            trust_env=trust_env,
            verify=_certificates(trust_env),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._cutter is not None:
            self._cutter.cancel()
        self._http.close()

    def _cut(self) -> None:
        """Ends all waits for bytes, because a server that sends one byte per second never reaches a timeout."""
        for connection in self._sockets:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _trace(self, event: str, information: Mapping[str, object]) -> None:
        """httpcore2's events: keeps the sockets of connections."""
        import httpcore2

        stream = information.get("return_value")
        if event == "connection.connect_tcp.complete" and isinstance(stream, httpcore2.NetworkStream):
            self._sockets.append(stream.get_extra_info("socket"))

    def get(self, path: str) -> bytes:
        """The body of a 200 response; otherwise raises EndpointError with the `status`."""
        with self._sent("GET", path) as response:
            return _body(response, MAX_PAGE_BYTES)

    def get_object(self, path: str) -> dict[str, object]:
        """`get`, a JSON object; raises EndpointError."""
        return json_object(self.get(path), f"{self.url}{path}", EndpointError, finite=False)

    def answer(self, body: Mapping[str, object], *, is_chat: bool, deadline_seconds: float = 600.0) -> Answer:
        """A streamed answer to `body`, with its times; raises EndpointError if it fails or takes too long."""
        path = PATHS[is_chat]
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reader = AnswerReader(f"{self.url}{path}", is_chat=is_chat)
        began = time.perf_counter()
        with self._sent("POST", path, streamed) as response:
            for event in events(response.iter_raw(), f"{self.url}{path}", began + deadline_seconds):
                reader.add(event, time.perf_counter() - began)
        return reader.end(time.perf_counter() - began)

    @contextmanager
    def _sent(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Iterator[httpx2.Response]:
        import httpx2

        where = f"{self.url}{path}"
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise too_late(where)
        timeout = httpx2.Timeout(min(self._timeout, left), connect=min(self._timeout, left, CONNECT_SECONDS))
        extensions = {"trace": self._trace}
        try:
            with self._http.stream(method, path, json=body, timeout=timeout, extensions=extensions) as response:
                if response.status_code != 200:
                    raise refusal(where, response.status_code, _body(response, MAX_ERROR_BYTES, is_cut=True))
                yield response
        except httpx2.HTTPError as error:
            raise (too_late(where) if time.monotonic() >= self._deadline else unreachable(where, error)) from None
        except httpx2.InvalidURL as error:
            raise EndpointError(f"{where}: expected the URL of a server, found {error}") from None


def base_url(url: str) -> str:
    """`http://host:port[/prefix]` without a trailing /v1 or slash; raises EndpointError."""
    with_scheme = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(with_scheme)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or parts.username is not None:
        raise EndpointError(
            f"expected the URL of a server as http://HOST:PORT, found {shown(url)}",
            hint="keys go into --api-key-file, never into the URL",
        )
    return with_scheme.rstrip("/").removesuffix("/v1").rstrip("/")


def _body(response: httpx2.Response, limit: int, *, is_cut: bool = False) -> bytes:
    content = b""
    for piece in response.iter_raw():
        content += piece
        if len(content) > limit:
            if is_cut:
                break
            raise EndpointError(f"{response.url}: expected at most {limit} bytes, found more")
    return content
