# SPDX-License-Identifier: Apache-2.0
"""Requests to a server that is not ours to trust, and its answers: bounded in time and size, with one error."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from dflash_trt.errors import ConfigError, EndpointError, cut, shown
from dflash_trt.files.json_file import json_object
from dflash_trt.files.read import read_text
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, of_request

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
MAX_LINE_BYTES = 8 * 2**20
MAX_STREAM_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice, streamed."""

    text: str
    reasoning: str
    """Thinking text of a chat: `reasoning_content` or `reasoning`."""
    finish: str | None
    """The server's `finish_reason`: stop, length, ..."""
    input_tokens: int | None
    """By the server's `usage`, as the two below."""
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens served from the prefix cache; None where the server does not say."""
    emitted: tuple[float, ...]
    """Seconds from the request to each event that carried text."""
    seconds: float
    """From the request to the end of the stream."""
    acceptance: ObservedAcceptance | None
    """Acceptance of this request, if the server reports it."""


class AnswerReader:
    def __init__(self, where: str, *, is_chat: bool) -> None:
        self._where = where
        self._is_chat = is_chat
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._emitted: list[float] = []
        self._finish: str | None = None
        self._usage: dict[str, object] = {}
        self._metrics: dict[str, object] = {}

    def add(self, event: dict[str, object], seconds: float) -> None:
        """An event that came `seconds` after the request; raises EndpointError for an event outside OpenAI's API."""
        self._usage = self._optional(event, "usage", dict) or self._usage
        self._metrics = self._optional(event, "metrics", dict) or self._metrics
        choices = self._optional(event, "choices", list) or []
        if not choices:
            return
        choice = choices[0]
        if not isinstance(choice, dict):
            raise EndpointError(f"{self._where}: expected choices as objects, found {shown(choice)}")
        part = (self._optional(choice, "delta", dict) or {}) if self._is_chat else choice
        text = self._optional(part, "content" if self._is_chat else "text", str) or ""
        thought = self._optional(part, "reasoning_content", str) or self._optional(part, "reasoning", str) or ""
        self._text.append(text)
        self._reasoning.append(thought)
        if text or thought:
            self._emitted.append(seconds)
        self._finish = self._optional(choice, "finish_reason", str) or self._finish

    def end(self, seconds: float) -> Answer:
        """The answer; raises EndpointError where the server did not say why it ended."""
        if self._finish is None:
            raise EndpointError(f"{self._where}: the answer has no finish_reason")
        details = self._optional(self._usage, "prompt_tokens_details", dict) or {}
        speculative = self._optional(self._metrics, "speculative_decoding", dict)
        return Answer(
            text="".join(self._text), reasoning="".join(self._reasoning), finish=self._finish,
            input_tokens=self._optional(self._usage, "prompt_tokens", int),
            output_tokens=self._optional(self._usage, "completion_tokens", int),
            cached_tokens=self._optional(details, "cached_tokens", int), emitted=tuple(self._emitted),
            seconds=seconds, acceptance=None if speculative is None else of_request(speculative, self._where),
        )  # fmt: skip

    def _optional(self, holder: dict[str, object], name: str, kind: type[T]) -> T | None:
        value = holder.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise EndpointError(f"{self._where}: expected {name} as {kind.__name__}, found {shown(value)}")
        return value


def events(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[dict[str, object]]:
    """The objects of a stream, up to its [DONE].

    `deadline` is a moment of time.perf_counter(). Raises EndpointError for a stream that ends without [DONE], says
    that it failed, is too long, or has not ended by then.
    """
    for line in _lines(pieces, where, deadline):
        if not line.startswith(b"data:"):
            continue  # comments that keep a connection open, names of events
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json_object(data, where, EndpointError, what="an event of a stream", finite=False)
        if event.get("error"):
            raise EndpointError(f"{where}: expected an answer, found in its stream: {cut(str(event['error']))}")
        yield event
    raise EndpointError(f"{where}: the stream broke off before [DONE]")


def _lines(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[bytes]:
    rest, total = b"", 0
    for piece in pieces:
        total += len(piece)
        if time.perf_counter() > deadline:
            raise EndpointError(f"{where}: expected the end of an answer in time, found more of it")
        if total > MAX_STREAM_BYTES or len(rest) > MAX_LINE_BYTES:
            raise EndpointError(f"{where}: expected an answer of bounded size, found more than {total} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    yield rest


MAX_PAGE_BYTES = 64 * 2**20  # of an answer that is not streamed: /metrics of a large deployment has some MiB
MAX_ERROR_BYTES = 64 * 2**10
CONNECT_SECONDS = 10.0
SLOW_HINT = "is it overloaded? --seconds gives it more time"
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_KEY_BYTES = 2**16


class Client(AbstractContextManager["Client", None]):
    """One server; use it as a context manager. Safe to share among threads."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 60.0, deadline_seconds: float | None = None
    ) -> None:
        """`url` with or without /v1; `timeout`: seconds for a connection, and for each wait for bytes.

        `deadline_seconds` from now every connection is cut, whatever still comes, and requests raise EndpointError.
        Raises EndpointError unless it is an http(s) URL.
        """
        import httpx

        self.url = base_url(url)
        host = urlsplit(self.url).hostname
        headers = {"accept-encoding": "identity"}  # a limit on bytes is then one on memory
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._deadline = math.inf if deadline_seconds is None else time.monotonic() + deadline_seconds
        self._sockets: list[socket.socket] = []
        self._cutter = None if deadline_seconds is None else threading.Timer(deadline_seconds, self._cut)
        if self._cutter is not None:
            self._cutter.daemon = True
            self._cutter.start()
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=None),
            trust_env=host not in LOOPBACK,  # no proxy between us and this machine
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
        """Ends all waits for bytes: a server that sends one a second never runs into a time-out."""
        for connection in self._sockets:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _trace(self, event: str, information: Mapping[str, object]) -> None:
        """httpcore's events: keeps the sockets of connections."""
        import httpcore

        stream = information.get("return_value")
        if event == "connection.connect_tcp.complete" and isinstance(stream, httpcore.NetworkStream):
            self._sockets.append(stream.get_extra_info("socket"))

    def get(self, path: str) -> bytes:
        """The body of a 200; raises EndpointError, whose `status` says what else came."""
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
    def _sent(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Iterator[httpx.Response]:
        import httpx

        where = f"{self.url}{path}"
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise _too_late(where)
        timeout = httpx.Timeout(min(self._timeout, left), connect=min(self._timeout, left, CONNECT_SECONDS))
        extensions = {"trace": self._trace}
        try:
            with self._http.stream(method, path, json=body, timeout=timeout, extensions=extensions) as response:
                if response.status_code != 200:
                    raise refusal(where, response.status_code, _body(response, MAX_ERROR_BYTES, is_cut=True))
                yield response
        except httpx.HTTPError as error:
            raise (_too_late(where) if time.monotonic() >= self._deadline else _unreachable(where, error)) from None
        except httpx.InvalidURL as error:
            raise EndpointError(f"{where}: expected the URL of a server, found {error}") from None


def _too_late(where: str) -> EndpointError:
    return EndpointError(f"{where}: no answer before the time was up", hint=SLOW_HINT)


def base_url(url: str) -> str:
    """`http://host:port[/prefix]` without /v1 or a slash at its end; raises EndpointError."""
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


def _body(response: httpx.Response, limit: int, *, is_cut: bool = False) -> bytes:
    content = b""
    for piece in response.iter_raw():
        content += piece
        if len(content) > limit:
            if is_cut:
                break
            raise EndpointError(f"{response.url}: expected at most {limit} bytes, found more")
    return content


def _unreachable(where: str, error: httpx.HTTPError) -> EndpointError:
    import httpx

    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return EndpointError(f"{where}: no server answered in time", hint="is it running?")
    if isinstance(error, httpx.TimeoutException):
        return EndpointError(f"{where}: timed out waiting for an answer", hint="is it overloaded?")
    if isinstance(error, httpx.ConnectError):
        message = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or "no connection"
        hint = "is it running, and is the port right?"
        if _is_unknown_host(error):
            hint = "is the host's name right, and can this machine resolve it?"
        elif "SSL" in message or "CERTIFICATE" in message.upper():
            hint = "is it https? Its certificate must be trusted here (SSL_CERT_FILE names others)"
        return EndpointError(f"{where}: expected a server, found: {message}", hint=hint)
    return EndpointError(f"{where}: expected a whole answer, found: {str(error) or type(error).__name__}")


def _is_unknown_host(error: BaseException | None) -> bool:
    """Looks through the causes: httpx keeps the resolver's error only there."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def read_api_key(file: Path | None) -> str | None:
    """The first line that is neither empty nor a comment; raises ConfigError where there is no key."""
    if file is None:
        return None
    lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEY_BYTES).splitlines()]
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{file}: no API key in it")
    return key
