# SPDX-License-Identifier: Apache-2.0
"""Decodes JSON objects of bounded size and depth."""

from __future__ import annotations

from itertools import accumulate

import msgspec

from dflash_trt.runtime.server.http_error import HttpError

MAX_ITEMS = 2**16
"""Texts, lists and objects in one JSON document: parsing blocks the event loop, 2.6 s for 5 million lists."""
MAX_VALUES = 2**20
"""Values of any kind in one JSON document; numbers are cheaper."""
MAX_NESTING = 128
"""Levels of lists and objects: an error that quotes a value with 960 raises RecursionError."""
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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
