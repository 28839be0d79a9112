# SPDX-License-Identifier: Apache-2.0
"""What keeps a server up: how many run and wait, how large a body is, and who may ask."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import read_text
from dflash_trt.server.http_refusal import Refusal

DEFAULT_MAX_WAITING = 256
DEFAULT_MAX_BODY_MIB = 16.0
BODY_SECONDS = 30.0
"""For a body to arrive, whole."""
MAX_KEYS_BYTES = 2**20


class Admission:
    """Counts the answers in the making; those beyond the limit are refused at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0

    @contextmanager
    def admit(self, number: int) -> Iterator[None]:
        """Room for `number` answers of one request, until it ends."""
        if number > self.limit:
            raise Refusal(400, f"n: expected at most {self.limit} answers of one request, found {number}")
        if self.active + number > self.limit:
            message = f"the server is full: {self.active} answers of at most {self.limit} run or wait"
            raise Refusal(429, message, code="server_full", headers={"retry-after": "1"})
        self.active += number
        try:
            yield
        finally:
            self.active -= number


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; Refusal where it is no JSON by its type, larger than `max_bytes` or too slow.

    The type is asked for because a page of another origin cannot send it without being asked (CORS).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type: expected application/json, found {kind or 'none'}")
    too_large = Refusal(413, f"body: expected at most {max_bytes} bytes, found more", headers={"connection": "close"})
    if int(request.headers.get("content-length", 0)) > max_bytes:  # a number: h11 has looked
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"body: expected all of it within {BODY_SECONDS:g} s, found {len(body)} bytes"
        raise Refusal(408, message, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(400, "body: expected all of it, found the connection closed") from None
    return bytes(body)


def decode_object(body: bytes) -> dict[str, object]:
    """A JSON object; Refusal for anything else."""
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"body: expected a JSON object, found {error}") from None


class Keys:
    """Who may ask."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, file: Path) -> Keys:
        """The keys of a file, one a line; ConfigError where there is none."""
        lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEYS_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"{file}: expected at least one API key, found none")
        return cls(keys)

    def check(self, authorization: str) -> None:
        """Refusal without one of the keys; takes as long for each."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            found = "another" if given else "none"
            message = f"authorization: expected Bearer and an API key of this server, found {found}"
            raise Refusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
