# SPDX-License-Identifier: Apache-2.0
"""Reads request bodies, within limits of time and memory, and decodes JSON objects of bounded size and depth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import accumulate

import msgspec
from starlette.requests import ClientDisconnect, Request

from dflash_trt.runtime.server.client_limits import ClientCounter, overloaded
from dflash_trt.runtime.server.http_error import HttpError

MAX_ITEMS = 2**16
"""Texts, lists and objects in one JSON document: parsing blocks the event loop, 2.6 s for 5 million lists."""
MAX_VALUES = 2**20
"""Values of any kind in one JSON document; numbers are cheaper."""
MAX_NESTING = 128
"""Levels of lists and objects: an error that quotes a value with 960 raises RecursionError."""
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
BODY_SECONDS = 30.0
"""Time limit for reading a body."""
SMALL_BODY_BYTES = 2**16
"""Largest body that `BodyReader` does not count: the number of connections bounds these."""
CONCURRENT_BODIES = 4
"""Bodies of the largest size that may be in memory at once; one client gets all but one."""


def decode_object(body: bytes | str, field: str = "body") -> dict[str, object]:
    """A JSON object; HttpError for anything else, and for one with too many values or levels."""
    try:
        encoded = body.encode() if isinstance(body, str) else body
        if (limit := _exceeded(encoded)) is not None:
            raise HttpError(400, f"{field}: it has more than {limit}")
        return msgspec.json.decode(encoded, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise HttpError(400, f"{field}: this is no JSON object: {error}") from None


def _exceeded(json: bytes) -> str | None:
    """The limit that a document exceeds, found by its bytes outside of texts."""
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


class BodyReader(ClientCounter):
    """Reads bodies of at most `max_bytes`, and bounds the bytes of all that are in memory."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def read(self, request: Request, client: str = "") -> AsyncGenerator[bytes, None]:
        """Reads a body, and counts it until the block ends.

        Raises HttpError where its type is not JSON, it is too large or too slow, or others take all memory.
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
        limit, of_client = CONCURRENT_BODIES * self._max_bytes, self.by_client[client] + counted
        if counted and (self.active + counted > limit or of_client > limit - self._max_bytes):
            error = overloaded(f"request bodies of {self.active} bytes are being read")
            error.headers["connection"] = "close"
            raise error
        with self._counted(client, counted):
            yield await self._receive(request)

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
