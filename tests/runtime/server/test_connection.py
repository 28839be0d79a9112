# SPDX-License-Identifier: Apache-2.0
"""Our limits change nothing for requests within them: the events are those of h11's own connection."""

from __future__ import annotations

import random

import h11
import pytest

from dflash_trt.runtime.server.http_server import MAX_HEADERS, Connection

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"


def fields(rng: random.Random) -> bytes:
    return b"".join(b"h%d: 0\r\n" % number for number in range(rng.randrange(MAX_HEADERS - 3)))


def request(rng: random.Random) -> bytes:
    body = b"".join(rng.choice([b"0", b"0a", b";", b"0\n", b"0;\r\n"]) for _ in range(rng.randrange(600)))
    if rng.random() < 0.5:
        return HEAD + fields(rng) + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    chunks = []
    while body:
        chunk, body = body[: (size := rng.randrange(1, 80))], body[size:]
        chunks.append(rng.choice([b"%x", b"0%x", b"%X;a=b"]) % len(chunk) + b"\r\n%b\r\n" % chunk)
    last = rng.choice([b"0", b"0" * 20, b"0;x=y"]) + b"\r\n"
    return HEAD + fields(rng) + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks) + last + fields(rng) + b"\r\n"


def events(connection: h11.Connection, pieces: list[bytes]) -> list[object]:
    """Of a server that answers each request once it is whole."""
    found: list[object] = []
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) is not h11.NEED_DATA:
            found.append(event)
            if isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return found


@pytest.mark.parametrize("seed", range(50))
def test_events_are_those_of_h11(seed: int) -> None:
    rng = random.Random(seed)
    sent = b"".join(request(rng) for _ in range(3))
    cuts = sorted(rng.randrange(len(sent)) for _ in range(rng.choice([0, 3, 40, len(sent) // 4])))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True) if begin < end]
    found = events(Connection(h11.SERVER), pieces)
    assert found == events(h11.Connection(h11.SERVER), pieces)
    assert sum(isinstance(event, h11.Request) for event in found) == 3
