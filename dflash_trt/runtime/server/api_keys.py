# SPDX-License-Identifier: Apache-2.0
"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import read_text
from dflash_trt.runtime.server.http_error import HttpError

MAX_KEYS_BYTES = 2**20


class ApiKeys:
    """The accepted API keys, as digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, file: Path) -> ApiKeys:
        """Reads a file with one key per line; ConfigError where there is none."""
        lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEYS_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if wrong := next((number for number, line in enumerate(lines, 1) if not line.isascii()), None):
            raise ConfigError(f"{file}, line {wrong}: expected ASCII, the only characters that a header can send")
        if not keys:
            raise ConfigError(
                f"{file} contains no API key",
                hint="write one key per line; lines that begin with # are comments",
            )
        return cls(keys)

    def check(self, authorization: str) -> str:
        """Returns the digest of a known key, in constant time; HttpError 401 for an unknown one."""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = (
                "authorization: unknown API key" if key else "authorization: missing, expected Bearer and an API key"
            )
            raise HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return digest.hex()
