# SPDX-License-Identifier: Apache-2.0
"""Whoever else may call rank 0 while it waits for the other ranks."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from dflash_trt.errors import RankError
from dflash_trt.runtime.ranks.link import Link, StrangerError
from dflash_trt.runtime.ranks.reception import _introduce

HTTP = b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"
# Length prefixes of multiprocessing, of the protocol before it, and of TLS.
PREFIXES = [
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff" + b"\xff" * 8,
    b"\xff\xff\xff\xff" + b"\x7f" + b"\xff" * 7,
    b"\xff\xff\xff\xfe",
    b"\x80\x00\x00\x00",
    b"\xff" * 5,
    b"\x00\x00\x01\x01",
    b"\x16\x03\x01\x02\x00",
]
RANKS = [b"0", b"-1", b"99", b"one", b"", b"9" * 16, b"1" * 17, b"1" * 100_000, "²".encode(), b"\xff"]


class Strangers:
    """Call one port, each in its own way, as a seed has it; those who stay silent keep their connection."""

    def __init__(self, port: int, key: bytes, seed: int) -> None:
        self._port = port
        self._key = key  # that of the job
        self._random = random.Random(seed)
        self._held: list[socket.socket] = []
        self.heard: list[str] = []
        """Who was let in."""
        self.ways: list[Callable[[socket.socket], None]] = [
            self.noise, self.request, self.prefix, self.digest, self.echo, self.dribble, self.hold, self.close,
            self.wrong_key, self.wrong_rank, self.second, self.close_after_key,
        ]  # fmt: skip

    def call(self, count: int) -> None:
        """So many of them, in a random order."""
        for way in self._random.choices(self.ways, k=count):
            self.call_as(way)

    def call_as(self, way: Callable[[socket.socket], None]) -> None:
        """One of them; what becomes of it is its own affair."""
        with suppress(OSError):
            connected = socket.create_connection(("127.0.0.1", self._port), timeout=5)
            with suppress(OSError, StrangerError, EOFError):
                way(connected)
            if way == self.hold:
                self._held.append(connected)
            else:
                connected.close()

    def flood(self, stop: threading.Event) -> None:
        """Connects and hangs up, or stays silent, until told to stop."""
        while not stop.is_set():
            self.call_as(self._random.choice([self.close, self.hold]))

    def leave(self) -> None:
        """Closes what is still open."""
        for connected in self._held:
            connected.close()

    def noise(self, connected: socket.socket) -> None:
        """Random bytes."""
        connected.sendall(self._random.randbytes(self._random.choice([1, 3, 4, 5, 12, 300, 70_000])))

    def request(self, connected: socket.socket) -> None:
        """A browser, or a scanner."""
        connected.sendall(HTTP)

    def prefix(self, connected: socket.socket) -> None:
        """A length, and less or more than that."""
        connected.sendall(self._random.choice(PREFIXES) + self._random.randbytes(self._random.choice([0, 1, 300])))

    def digest(self, connected: socket.socket) -> None:
        """A handshake with an invented digest, of any length."""
        connected.recv(100)
        length = self._random.choice([0, 1, 16, 32, 200, 256, 257])
        connected.sendall(length.to_bytes(4, "big") + self._random.randbytes(length))

    def echo(self, connected: socket.socket) -> None:
        """Rank 0's own challenge, sent back to it."""
        connected.sendall(connected.recv(100))

    def dribble(self, connected: socket.socket) -> None:
        """Half a message, and then nothing."""
        connected.recv(100)
        connected.sendall((20).to_bytes(4, "big") + self._random.randbytes(3))
        self._held.append(connected.dup())

    def hold(self, connected: socket.socket) -> None:
        """Nothing at all."""

    def close(self, connected: socket.socket) -> None:
        """Hangs up at once."""

    def wrong_key(self, connected: socket.socket) -> None:
        """Another job of the same user."""
        with suppress(RankError):
            _introduce(Link(connected), self._random.randbytes(32), 1)
            self.heard.append("wrong key")

    def wrong_rank(self, connected: socket.socket) -> None:
        """Knows the key, and is none of the ranks."""
        link = Link(connected)
        link.answer(self._key)
        link.send(self._random.choice(RANKS))
        if not link.receive():
            self.heard.append("wrong rank")

    def second(self, connected: socket.socket) -> None:
        """A second rank 1, which rank 0 has already."""
        with suppress(RankError):
            _introduce(Link(connected), self._key, 1)
            self.heard.append("second rank 1")

    def close_after_key(self, connected: socket.socket) -> None:
        """A rank that dies as it joins."""
        Link(connected).answer(self._key)
