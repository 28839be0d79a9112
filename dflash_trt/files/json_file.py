# SPDX-License-Identifier: Apache-2.0
"""Reads files and the JSON objects in them; a key that stands twice is refused, since one would be dropped."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_trt.errors import DFlashError


def read_bytes(file: Path, error: type[DFlashError]) -> bytes:
    """The content of `file`; raises `error` when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as problem:
        raise error(f"{file}: expected a readable file, found: {problem.strerror}") from None


def json_object(
    content: bytes, file: Path, error: type[DFlashError], *, what: str = "a JSON object", hint: str | None = None
) -> dict[str, object]:
    """The JSON object that is `content`, read from `file`.

    Raises `error`, saying that `what` was expected, for anything else and for an object with a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{file}: expected {what} with each key once, found {twice!r} twice", hint=hint)
        return entries

    try:
        document = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:  # not UTF-8, not JSON, or absurdly long or deep
        raise error(f"{file}: expected {what}, found text that is not JSON ({problem})", hint=hint) from None
    if not isinstance(document, dict):
        raise error(f"{file}: expected {what}, found {type(document).__name__}", hint=hint)
    return document
