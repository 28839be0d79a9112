# SPDX-License-Identifier: Apache-2.0
"""Server-sent events as OpenAI's API sends them: JSON objects, then [DONE]."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from dflash_trt.errors import EndpointError, cut
from dflash_trt.files.json_file import json_object

MAX_LINE_BYTES = 8 * 2**20
MAX_STREAM_BYTES = 256 * 2**20


def events(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[dict[str, object]]:
    """The objects of a stream, up to its [DONE].

    `deadline` is a moment of time.perf_counter(). Raises EndpointError for a stream that ends without [DONE], says
    that it failed, is too long, or has not ended by then.
    """
    for line in _lines(pieces, where, deadline):
        if not line.startswith(b"data:"):
            continue  # comments that keep a connection open, names of events
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json_object(data, where, EndpointError, what="an event of a stream", finite=False)
        if event.get("error"):
            raise EndpointError(f"{where}: expected an answer, found in its stream: {cut(str(event['error']))}")
        yield event
    raise EndpointError(f"{where}: expected a stream that ends with [DONE], found one that breaks off")


def _lines(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[bytes]:
    rest, total = b"", 0
    for piece in pieces:
        total += len(piece)
        if time.perf_counter() > deadline:
            raise EndpointError(f"{where}: expected the end of an answer in time, found more of it")
        if total > MAX_STREAM_BYTES or len(rest) > MAX_LINE_BYTES:
            raise EndpointError(f"{where}: expected an answer of bounded size, found more than {total} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    yield rest
