# SPDX-License-Identifier: Apache-2.0
"""Admission control and request bodies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate

import msgspec
from starlette.requests import ClientDisconnect, Request

from dflash_trt.runtime.server.http_error import HttpError

BODY_SECONDS = 30.0
"""Time limit for reading a body."""
SMALL_BODY_BYTES = 2**16
"""Not counted in `BodyReader`: connections bound them."""
CONCURRENT_BODIES = 4
"""Bodies of the largest size that are in memory at once; a client leaves one to the others."""
OTHERS_SHARE = 8
"""One client leaves 1 / 8 of the places to the others."""
MAX_ITEMS = 2**16
"""Texts, lists and objects in one JSON document: nothing else runs while they are made, 2.6 s for 5 million lists."""
MAX_VALUES = 2**20
"""And numbers, which are cheaper."""
MAX_NESTING = 128
"""Levels of lists and objects: errors that quote a value with 960 ended in Python's RecursionError."""
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class Admission:
    """Bounds the sequences that run or wait, of all clients and of each; a request beyond a bound gets 429 at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.limit_per_client = limit - limit // OTHERS_SHARE
        self.active = 0
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def admit(self, num_sequences: int, client: str) -> Iterator[None]:
        """Holds the places of one request's sequences until the block ends."""
        if num_sequences > self.limit_per_client:
            limit = self.limit_per_client
            raise HttpError(400, f"n: expected at most {limit} sequences in one request, found {num_sequences}")
        if self.active + num_sequences > self.limit:
            raise overloaded(f"{self.active} of {self.limit} sequences are running or queued")
        if self._by_client[client] + num_sequences > self.limit_per_client:
            raise overloaded(f"{self._by_client[client]} sequences of this client are running or queued")
        self.active += num_sequences
        self._by_client[client] += num_sequences
        try:
            yield
        finally:
            self.active -= num_sequences
            self._by_client[client] -= num_sequences
            if not self._by_client[client]:
                del self._by_client[client]


def overloaded(reason: str) -> HttpError:
    """A 429."""
    message = f"server overloaded: {reason}"
    return HttpError(429, message, code="server_overloaded", headers={"retry-after": "1"})


class BodyReader:
    """Reads bodies of at most `max_bytes`, within a bound for all that are in memory."""

    def __init__(self, max_bytes: int) -> None:
        self.active_bytes = 0
        self._by_client: Counter[str] = Counter()
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def read(self, request: Request, client: str = "") -> AsyncGenerator[bytes, None]:
        """A body, counted while the block runs.

        Raises HttpError where its type is not JSON, it is too large or arrives too slowly, or others take all memory.
        The type is required because a cross-origin page cannot send it without a CORS preflight.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise HttpError(415, f"content-type: expected application/json, found {content_type or 'no header'}")
        announced = request.headers.get("content-length")  # h11 has checked that it is a number
        size = self._max_bytes if announced is None else int(announced)
        if size > self._max_bytes:
            raise self._too_large()
        counted = size if size > SMALL_BODY_BYTES else 0
        limit, of_client = CONCURRENT_BODIES * self._max_bytes, self._by_client[client] + counted
        if counted and (self.active_bytes + counted > limit or of_client > limit - self._max_bytes):
            error = overloaded(f"request bodies of {self.active_bytes} bytes are being read")
            error.headers["connection"] = "close"
            raise error
        self._count(client, counted)
        try:
            yield await self._receive(request)
        finally:
            self._count(client, -counted)

    def _count(self, client: str, size: int) -> None:
        self.active_bytes += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]

    async def _receive(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_bytes:
                        raise self._too_large()
        except TimeoutError:
            message = f"body: incomplete after {BODY_SECONDS:g} s: {len(body)} bytes received"
            raise HttpError(408, message, headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise HttpError(400, "body: connection closed before it was complete") from None
        return bytes(body)

    def _too_large(self) -> HttpError:
        message = f"body: larger than the limit of {self._max_bytes} bytes"
        return HttpError(413, message, headers={"connection": "close"})


def decode_object(body: bytes | str, field: str = "body") -> dict[str, object]:
    """A JSON object; HttpError for anything else, and for one with too many values or levels."""
    try:
        encoded = body.encode() if isinstance(body, str) else body
        if (limit := _exceeded(encoded)) is not None:
            raise HttpError(400, f"{field}: expected at most {limit}, found more")
        return msgspec.json.decode(encoded, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise HttpError(400, f"{field}: expected a JSON object, found {error}") from None


def _exceeded(json: bytes) -> str | None:
    """The limit that a document is beyond, from its bytes outside of texts."""
    unescaped = json.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in json else json
    num_texts = unescaped.count(b'"') // 2
    outside = b"" if num_texts > MAX_ITEMS else b"".join(unescaped.split(b'"')[::2])
    if num_texts + outside.count(b"[") + outside.count(b"{") > MAX_ITEMS:
        return f"{MAX_ITEMS} texts, lists and objects"
    if outside.count(b",") > MAX_VALUES:
        return f"{MAX_VALUES} values"
    brackets = outside.translate(None, NO_BRACKETS)
    if max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0) > MAX_NESTING:
        return f"{MAX_NESTING} levels of lists and objects"
    return None
