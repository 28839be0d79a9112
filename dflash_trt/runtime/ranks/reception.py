# SPDX-License-Identifier: Apache-2.0
"""Rank 0 lets the other ranks in, and whoever else connects costs it nothing.

Each caller has a thread of its own, and few bytes, until it has proved that it knows the key; when too many wait, the
one that has waited longest is sent away. A rank that this hits calls again.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from dflash_trt.errors import RankError
from dflash_trt.runtime.ranks.link import Link, StrangerError

START_SECONDS = 300.0
HANDSHAKE_SECONDS = 10.0
MAX_WAITING = 128
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.1
_MAX_RANK_BYTES = 16
_MAX_VERDICT_BYTES = 256
CHECK_KEY = "start all ranks with one launcher, or give DFLASH_TRT_RANKS_KEY the same value on every host"


class Reception:
    """Who has called, who waits to be heard, and who is let in."""

    def __init__(self, key: bytes, size: int) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._waiting: dict[Link, float] = {}  # in the order of their calls, with the end of their time
        self._links: dict[int, Link] = {}
        self._expected = range(1, size)

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        with self._lock:
            return [rank for rank in self._expected if rank not in self._links]

    def links(self) -> dict[int, Link]:
        """The others, by rank."""
        return dict(sorted(self._links.items()))

    def hear(self, caller: socket.socket) -> None:
        """Hears a caller, in a thread of its own."""
        link = Link(caller)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self._send_away(next(iter(self._waiting)))
            self._waiting[link] = time.monotonic() + HANDSHAKE_SECONDS
        threading.Thread(target=self._hear, args=(link,), daemon=True).start()

    def send_away(self, until: float) -> None:
        """Sends away whose time ended before `until`, by the monotonic clock."""
        with self._lock:
            for link in [link for link, end in self._waiting.items() if end < until]:
                self._send_away(link)

    def _send_away(self, link: Link) -> None:
        del self._waiting[link]
        link.end()

    def _hear(self, link: Link) -> None:
        with suppress(OSError, StrangerError):  # anybody may call: only who knows the key is heard
            link.challenge(self._key)
            link.send(self._let_in(link, link.receive(_MAX_RANK_BYTES)).encode())
        with self._lock:
            if link in self._waiting:
                self._send_away(link)

    def _let_in(self, link: Link, name: bytes) -> str:
        """Nothing, or why not."""
        rank = int(name) if name.isdigit() else 0
        with self._lock:
            if rank not in self._expected:
                return f"expected one of the ranks {self._expected[0]} to {self._expected[-1]}, found another"
            if rank in self._links:
                return f"rank {rank}: expected one process, found a second"
            if self._waiting.pop(link, None) is not None:  # else it was sent away meanwhile, and will call again
                self._links[rank] = link
        return ""


def receive_followers(server: socket.socket, key: bytes, size: int) -> dict[int, Link]:
    """Rank 0's links to all others, by rank; `server` listens, and no longer than this takes.

    Raises RankError when a rank does not come.
    """
    reception = Reception(key, size)
    deadline = time.monotonic() + START_SECONDS
    with server:
        server.settimeout(_POLL_SECONDS)
        try:
            while missing := reception.missing():
                if time.monotonic() > deadline:
                    raise RankError(
                        f"ranks {', '.join(map(str, missing))}: expected them to connect within {START_SECONDS:.0f} s,"
                        " found none that knows the key",
                        hint=CHECK_KEY,
                    )
                reception.send_away(until=time.monotonic())
                with suppress(OSError):  # nobody called, or hung up again
                    reception.hear(server.accept()[0])
        finally:
            reception.send_away(until=float("inf"))
    return reception.links()


def call_leader(address: str, port: int, key: bytes, rank: int) -> Link:
    """The link of another rank to rank 0, which listens at `address`; raises RankError where it lets nobody in."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            link = Link(socket.create_connection((address, port), timeout=START_SECONDS))
            return _introduce(link, key, rank)
        except ConnectionRefusedError as error:
            raise _refused(address, port, error) from None
        except OSError as error:  # rank 0 had no time for us
            if time.monotonic() > deadline:
                raise _refused(address, port, error) from None
            time.sleep(_RETRY_SECONDS)


def _introduce(link: Link, key: bytes, rank: int) -> Link:
    patience = threading.Timer(HANDSHAKE_SECONDS, link.end)
    patience.daemon = True
    patience.start()
    try:
        link.answer(key)
        link.send(b"%d" % rank)
        verdict = link.receive(_MAX_VERDICT_BYTES).decode()
    except StrangerError as error:
        raise RankError(f"rank {rank}: expected the key that rank 0 has, found: {error}", hint=CHECK_KEY) from None
    finally:
        patience.cancel()
    if verdict:
        raise RankError(f"rank 0 refuses rank {rank}: {verdict}")
    return link


def _refused(address: str, port: int, error: OSError) -> RankError:
    return RankError(f"rank 0: expected it to listen at {address} port {port}, found: {error}")
