# SPDX-License-Identifier: Apache-2.0
"""The API key of a server, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import read_text

if TYPE_CHECKING:
    pass


MAX_KEY_BYTES = 2**16


def read_api_key(file: Path | None) -> str | None:
    """The first line that is neither empty nor a comment; raises ConfigError if there is no key."""
    if file is None:
        return None
    lines = [line.strip() for line in read_text(file, ConfigError, limit=MAX_KEY_BYTES).splitlines()]
    key = next((line for line in lines if line and not line.startswith("#")), "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{file}: no API key in it")
    return key
