# SPDX-License-Identifier: Apache-2.0
"""A server's API key, from a file: on a command line other users would see it."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import read_text

MAX_BYTES = 2**16


def read_api_key(file: Path | None) -> str | None:
    """The first line that is neither empty nor a comment; raises ConfigError where there is no key."""
    if file is None:
        return None
    lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_BYTES).splitlines()]
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{file}: expected an API key, found none")
    return key
