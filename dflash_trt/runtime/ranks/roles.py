# SPDX-License-Identifier: Apache-2.0
"""Rank 0 leads, the others follow; whichever is lost ends them all."""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue

from dflash_trt.errors import DFlashError, RankError
from dflash_trt.runtime.ranks.link import Link

SETTLE_SECONDS = 0.3
"""A rank that breaks makes others stumble: rank 0 waits so long for the one that broke."""
LINGER_SECONDS = 1.0
"""Launchers kill every rank once one has ended: the others give rank 0 so long to say why."""
GOODBYE_SECONDS = 10.0
_REPORT = b"!"


class Leader:
    """Rank 0: sends commands and watches the other ranks; there may be none."""

    rank = 0

    def __init__(self, followers: Mapping[int, Link]) -> None:
        self.size = len(followers) + 1
        self._followers = followers
        self._leaving = False

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises RankError, with the same words on every rank, where a rank's facts differ from rank 0's.

        From here on a rank that is lost ends this process: no exception could reach a thread that waits in a
        collective.
        """
        found = {rank: _facts_of(rank, link) for rank, link in self._followers.items()}
        verdict = _disagreement(facts, found)
        for link in self._followers.values():
            with suppress(OSError):  # `_watch` will see it
                link.send(verdict.encode())
        if verdict:
            raise RankError(verdict)
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, command: Sequence[int]) -> None:
        """Sends a command, which must not be empty, to every other rank."""
        message = array("q", command).tobytes()
        for link in self._followers.values():
            link.send(message)

    def dismiss(self) -> None:
        """Lets the others return from following, and waits until they have."""
        self._leaving = True
        for link in self._followers.values():
            link.send(b"")
        for link in self._followers.values():
            link.wait_for_end(GOODBYE_SECONDS)

    def abandon(self, error: BaseException) -> None:
        """Ends the others because of an error here; the error of a lost rank goes before one that only stumbled."""
        if self._followers and not isinstance(error, DFlashError | KeyboardInterrupt):
            time.sleep(2 * SETTLE_SECONDS)  # `_watch` may end this process meanwhile
        self._leaving = True
        for link in self._followers.values():
            link.end()

    def _watch(self) -> None:
        """Waits for a rank that reports an error or ends; the first that did not only stumble is the cause."""
        reports: dict[int, str | None] = {}
        with selectors.DefaultSelector() as selector:
            for rank, link in self._followers.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while None not in reports.values():
                events = selector.select(SETTLE_SECONDS if reports else None)
                if not events:
                    break
                for key, _ in events:
                    selector.unregister(key.fileobj)
                    reports[key.data] = _last_words(self._followers[key.data])
        if self._leaving:
            return
        with suppress(OSError):
            print(f"error: {_cause(reports)}", file=sys.stderr, flush=True)
        os._exit(1)


class Follower:
    """Another rank: receives commands, and ends with rank 0."""

    def __init__(self, rank: int, size: int, leader: Link) -> None:
        self.rank = rank
        self.size = size
        self._leader = leader
        self._commands: SimpleQueue[Sequence[int] | None] = SimpleQueue()

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises RankError, with the same words on every rank, where a rank's facts differ from rank 0's."""
        self._leader.send(json.dumps(dict(facts)).encode())
        if verdict := self._leader.receive().decode():
            raise RankError(verdict)
        threading.Thread(target=self._listen, daemon=True).start()

    def receive(self) -> Sequence[int] | None:
        """The next command; None when there will be no more."""
        return self._commands.get()

    def leave(self) -> None:
        """Ends this rank's part, after the last command."""
        self._leader.end()

    def report(self, text: str) -> None:
        """Tells rank 0 why this rank ends, and lets it say so."""
        with suppress(OSError):
            self._leader.send(_REPORT + text.encode())
        self._leader.wait_for_end(GOODBYE_SECONDS)
        time.sleep(LINGER_SECONDS)

    def _listen(self) -> None:
        try:
            while message := self._leader.receive():
                self._commands.put(array("q", message))
        except OSError:
            time.sleep(LINGER_SECONDS)
            os._exit(1)  # the main thread may wait in a collective that nobody else will join
        self._commands.put(None)


def _facts_of(rank: int, link: Link) -> dict[str, str]:
    try:
        message = link.receive()
    except OSError:
        raise RankError(_loss(rank, None)) from None
    if message.startswith(_REPORT):
        raise RankError(_loss(rank, message.removeprefix(_REPORT).decode()))
    facts: dict[str, str] = json.loads(message)
    return facts


def _disagreement(expected: Mapping[str, str], found: Mapping[int, Mapping[str, str]]) -> str:
    """The first fact in which a rank differs from rank 0, or nothing; rank 0 itself where all others agree."""
    for fact, value in expected.items():
        odd = [rank for rank in found if found[rank][fact] != value]
        if not odd:
            continue
        others = {found[rank][fact] for rank in found}
        if len(odd) == len(found) > 1 and len(others) == 1:
            return f"rank 0: {fact}: expected {others.pop()} as on the other ranks, found {value}"
        return f"rank {odd[0]}: {fact}: expected {value} as on rank 0, found {found[odd[0]][fact]}"
    return ""


def _last_words(link: Link) -> str | None:
    """What an ending rank reports; None when it was killed."""
    try:
        return link.receive().removeprefix(_REPORT).decode()
    except OSError:
        return None


def _cause(reports: Mapping[int, str | None]) -> str:
    """A killed rank makes others stumble and report that; otherwise whichever reported first."""
    killed = [rank for rank, report in reports.items() if report is None]
    rank = (killed or list(reports))[0]
    return _loss(rank, reports[rank])


def _loss(rank: int, report: str | None) -> str:
    if report is None:
        return f"rank {rank}: expected it to work until rank 0 has finished, found that its process was killed"
    return f"rank {rank}: {report}"
