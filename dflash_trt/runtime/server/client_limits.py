# SPDX-License-Identifier: Apache-2.0
"""Admission control: how many sequences of each client run or wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_trt.runtime.server.http_error import HttpError

OTHERS_SHARE = 8
"""Reciprocal of the share of places that one client leaves to others."""


class ClientCounter:
    """Counts what is in use, by all clients and by each."""

    def __init__(self) -> None:
        self.active = 0
        self.by_client: Counter[str] = Counter()

    @contextmanager
    def _counted(self, client: str, number: int) -> Iterator[None]:
        """Counts `number` until the block ends."""
        self._add(client, number)
        try:
            yield
        finally:
            self._add(client, -number)

    def _add(self, client: str, number: int) -> None:
        self.active += number
        self.by_client[client] += number
        if not self.by_client[client]:
            del self.by_client[client]


class Admission(ClientCounter):
    """Bounds the sequences that run or wait; a request beyond a bound gets 429 at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.limit_per_client = limit - limit // OTHERS_SHARE

    @contextmanager
    def admit(self, num_sequences: int, client: str) -> Iterator[None]:
        """Holds the places of one request's sequences until the block ends."""
        if num_sequences > self.limit_per_client:
            limit = self.limit_per_client
            raise HttpError(400, f"n: expected at most {limit} sequences in one request, found {num_sequences}")
        if self.active + num_sequences > self.limit:
            raise overloaded(f"{self.active} of {self.limit} sequences are running or queued")
        if self.by_client[client] + num_sequences > self.limit_per_client:
            raise overloaded(f"{self.by_client[client]} sequences of this client are running or queued")
        with self._counted(client, num_sequences):
            yield


def overloaded(reason: str) -> HttpError:
    """The 429 of a request that may be tried again."""
    message = f"server overloaded: {reason}"
    return HttpError(429, message, code="server_overloaded", headers={"retry-after": "1"})
