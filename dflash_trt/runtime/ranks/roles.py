# SPDX-License-Identifier: Apache-2.0
"""Rank 0 leads, the others follow; when one fails or ends early, all end, and rank 0 says why."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.errors import DFlashError, RankError

if TYPE_CHECKING:
    from dflash_trt.runtime.ranks.link import Link

STUMBLE_SECONDS = 0.3
"""A rank that ends makes others fail in their collectives: rank 0 waits so long for the one that ended."""
LINGER_SECONDS = 1.0
"""Launchers kill every rank once one has ended: the others leave rank 0 so long to print the error."""
SHUTDOWN_SECONDS = 10.0

# Messages of rank 0 other than commands, which are msgpack arrays and begin with other bytes.
FACTS_AGREE, FINISHED, ABORTED = b"facts agree", b"finished", b"aborted"


class RankFacts(msgspec.Struct, tag=True):
    """Facts that must agree on every rank."""

    facts: dict[str, str]


class Failed(msgspec.Struct, tag=True):
    """Why a rank ends."""

    reason: str


class Done(msgspec.Struct, tag=True):
    """A rank ends because rank 0 said so."""


_DECODER = msgspec.msgpack.Decoder(RankFacts | Failed | Done)
Message = RankFacts | Failed | Done | None
"""Message from another rank; None: its connection has closed."""


class Followed(Exception):  # noqa: N818 - nothing is wrong
    """Rank 0 has finished: a rank that followed it has nothing more to do in the block of `join`."""


class Leader:
    """Rank 0: sends commands and watches the other ranks; there may be none."""

    rank = 0

    def __init__(self, links: Mapping[int, Link]) -> None:
        self.size = len(links) + 1
        self._links = links
        self._messages: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._is_ending = False
        self._threads = [threading.Thread(target=self._read, args=item, daemon=True) for item in links.items()]
        for thread in self._threads:
            thread.start()

    def verify_same_facts(self, facts: Mapping[str, str]) -> None:
        """Raises RankError where a rank's facts differ from rank 0's.

        From here on a rank that fails or is lost ends this process: no exception could reach a thread that waits in a
        collective.
        """
        others: dict[int, dict[str, str]] = {}
        while len(others) < len(self._links):
            rank, message = self._messages.get()
            if not isinstance(message, RankFacts):
                raise RankError(_failure({rank: message}))
            others[rank] = message.facts
        if difference := _difference(facts, others):
            raise RankError(difference)
        self.send(FACTS_AGREE)
        watcher = threading.Thread(target=self._watch, daemon=True)
        self._threads.append(watcher)
        watcher.start()

    def send(self, message: bytes) -> None:
        """Sends a message to every other rank."""
        for link in self._links.values():
            link.send(message)

    def shutdown(self, message: bytes = FINISHED) -> None:
        """Lets the others end, and waits until they have, and the threads here.

        One that went on could drop the last reference to a process group while Python ends: torch then aborts.
        """
        self._is_ending = True
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for link in self._links.values():
            with suppress(RuntimeError):  # the rank is lost
                link.send(message, timedelta(seconds=SHUTDOWN_SECONDS))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def abort(self, error: BaseException) -> None:
        """Ends the others because of an error here, unless it only followed from the loss of another rank."""
        if self._links and not isinstance(error, DFlashError | KeyboardInterrupt):
            time.sleep(2 * STUMBLE_SECONDS)  # `_watch` may end this process meanwhile
        self.shutdown(ABORTED)

    def _read(self, rank: int, link: Link) -> None:
        message: Message = Failed("")
        while isinstance(message, RankFacts | Failed):
            try:
                message = _DECODER.decode(link.receive())
            except RuntimeError:
                message = None
            except msgspec.MsgspecError as error:
                message = Failed(f"sent a message that cannot be read: {error}")
            self._messages.put((rank, message))

    def _watch(self) -> None:
        """Ends this process when a rank fails or is lost."""
        failed: dict[int, Message] = {}
        running = set(self._links)
        while running and None not in failed.values():
            try:
                rank, message = self._messages.get(timeout=STUMBLE_SECONDS if failed else None)
            except Empty:
                break
            if isinstance(message, Done):
                running.discard(rank)
            else:
                failed.setdefault(rank, message)
        if failed and not self._is_ending:
            with suppress(OSError):
                print(f"error: {_failure(failed)}", file=sys.stderr, flush=True)
            os._exit(1)


ALONE = Leader({})
"""Rank 0 without others."""


class Follower:
    """Another rank: receives commands, and ends with rank 0."""

    def __init__(self, rank: int, size: int, leader: Link) -> None:
        self.rank = rank
        self.size = size
        self._leader = leader
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def verify_same_facts(self, facts: Mapping[str, str]) -> None:
        """Returns once rank 0 has found the same facts on every rank; where they differ, it ends this process."""
        self._send(RankFacts(dict(facts)))
        assert self._messages.get() == FACTS_AGREE

    def receive(self) -> bytes | None:
        """The next command; None when there will be no more."""
        message = self._messages.get()
        return None if message == FINISHED else message

    def finish(self) -> None:
        """Tells rank 0 that this rank has done all commands, and ends the thread here, as `Leader.shutdown` does."""
        self._send(Done())
        if threading.current_thread() is not self._reader:  # there, where rank 0 has aborted
            self._reader.join(SHUTDOWN_SECONDS)

    def fail(self, reason: str) -> None:
        """Tells rank 0 why this rank ends, and waits for its end, which ends this process."""
        with suppress(RuntimeError):
            self._send(Failed(reason))
        time.sleep(SHUTDOWN_SECONDS)

    def _send(self, message: RankFacts | Failed | Done) -> None:
        self._leader.send(msgspec.msgpack.encode(message), timedelta(seconds=SHUTDOWN_SECONDS))

    def _read(self) -> None:
        message = b""
        with suppress(RuntimeError):  # rank 0 is lost
            while message not in (FINISHED, ABORTED):
                message = self._leader.receive()
                self._messages.put(message)
            if message == FINISHED:
                return
            self.finish()
        time.sleep(LINGER_SECONDS)
        os._exit(1)  # the main thread may wait in a collective that no other rank will join


def _difference(expected: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> str:
    """The first fact in which a rank differs from rank 0, or nothing; rank 0 itself where all others agree."""
    for fact, value in expected.items():
        odd = [rank for rank, facts in others.items() if facts.get(fact) != value]
        if not odd:
            continue
        values = {facts.get(fact) for facts in others.values()}
        if len(odd) == len(others) > 1 and len(values) == 1:
            return f"rank 0: {fact}: expected {values.pop()} as on the other ranks, found {value}"
        return f"rank {odd[0]}: {fact}: expected {value} as on rank 0, found {others[odd[0]].get(fact)}"
    return ""


def _failure(failed: Mapping[int, object]) -> str:
    """The cause: a rank that was lost makes others fail; without one, whichever failed first."""
    lost = [rank for rank, message in failed.items() if not isinstance(message, Failed)]
    rank = (lost or list(failed))[0]
    message = failed[rank]
    return f"rank {rank}: {message.reason if isinstance(message, Failed) else 'its process ended unexpectedly'}"
