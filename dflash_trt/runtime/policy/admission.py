# SPDX-License-Identifier: Apache-2.0
"""Policy of whose request is admitted next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from dflash_trt.runtime.policy.step_record import Policy

R = TypeVar("R")


class FirstComeFirstServed(Policy, Generic[R]):
    """Waiting requests in the order of their arrival: a large one is never overtaken, so it never starves."""

    def __init__(self) -> None:
        self._waiting: deque[R] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[R]:
        return iter(self._waiting)

    def add(self, request: R) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def next(self) -> R | None:
        """The request to admit next, which stays queued until it is removed; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def remove(self, request: R) -> None:
        """Takes a request out: it was admitted, or it has ended."""
        self._waiting.remove(request)

    def clear(self) -> None:
        """Forgets all requests."""
        self._waiting.clear()
