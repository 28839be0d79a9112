# SPDX-License-Identifier: Apache-2.0
"""Admission control, request bodies and API keys."""

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
from dflash_trt.server.http_error import HttpError

BODY_SECONDS = 30.0
"""Time limit for reading a body."""
MAX_KEYS_BYTES = 2**20


class Admission:
    """Bounds the sequences that run or wait; a request beyond the bound gets 429 at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0

    @contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Holds the places of one request's sequences until the block ends."""
        if num_sequences > self.limit:
            raise HttpError(400, f"n: expected at most {self.limit} sequences in one request, found {num_sequences}")
        if self.active + num_sequences > self.limit:
            message = f"server overloaded: {self.active} of {self.limit} sequences are running or queued"
            raise HttpError(429, message, code="server_overloaded", headers={"retry-after": "1"})
        self.active += num_sequences
        try:
            yield
        finally:
            self.active -= num_sequences


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; HttpError where its type is not JSON, it exceeds `max_bytes` or arrives too slowly.

    The type is required because a cross-origin page cannot send it without a CORS preflight.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type: expected application/json, found {kind or 'no header'}")
    too_large = HttpError(413, f"body: larger than the limit of {max_bytes} bytes", headers={"connection": "close"})
    if int(request.headers.get("content-length", 0)) > max_bytes:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"body: incomplete after {BODY_SECONDS:g} s: {len(body)} bytes received"
        raise HttpError(408, message, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise HttpError(400, "body: connection closed before it was complete") from None
    return bytes(body)


def decode_object(body: bytes) -> dict[str, object]:
    """A JSON object; HttpError for anything else."""
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"body: expected a JSON object, found {error}") from None


class ApiKeys:
    """The accepted API keys, as digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, file: Path) -> ApiKeys:
        """The keys of a file, one a line; ConfigError where there is none."""
        lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEYS_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(
                f"{file}: no API key in it", hint="write one key a line; lines that begin with # are comments"
            )
        return cls(keys)

    def check(self, authorization: str) -> None:
        """HttpError 401 without one of the keys; takes the same time for every key."""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = (
                "authorization: unknown API key" if key else "authorization: missing, expected Bearer and an API key"
            )
            raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
