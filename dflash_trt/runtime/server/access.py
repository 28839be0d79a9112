# SPDX-License-Identifier: Apache-2.0
"""Checks of a request's API key and of its Host header."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.read import read_text
from dflash_trt.runtime.server.http_error import HttpError

PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/health")
"""Paths that need no key; those below /page/ need none, either."""
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


def check_key(keys: ApiKeys, request: Request) -> None:
    """Raises HttpError 401 without a key, except on public paths."""
    if (path := request.scope["path"]) not in PUBLIC_PATHS and not path.startswith("/page/"):
        request.scope["dflash_trt.client"] = keys.check(request.headers.get("authorization", ""))


def check_host(names: frozenset[str], request: Request) -> None:
    """Raises HttpError 403 for hosts that are neither loopback names nor in `names`.

    A page whose name is rebound to 127.0.0.1 sends its own name.
    """
    if (host := request.headers.get("host")) is None:  # HTTP/1.0; browsers send it
        return
    name = re.sub(r":\d*$", "", host.lower()).strip("[]")
    is_loopback = name == "localhost" or name.endswith(".localhost")
    with suppress(ValueError):
        is_loopback = is_loopback or ipaddress.ip_address(name).is_loopback
    if not is_loopback and name not in names:
        raise HttpError(403, f"host: {shown(host)} is neither a loopback name nor an --allowed-host")
