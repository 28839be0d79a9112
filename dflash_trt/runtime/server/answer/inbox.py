# SPDX-License-Identifier: Apache-2.0
"""From the decoder's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Inbox:
    """Passes items from any thread to callbacks on the event loop, in order.

    No sender waits for the loop, which is woken once for all items that have come by the time it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._is_woken = False

    def sender(self, receive: Callable[[T], None]) -> Callable[[T], None]:
        """A function that sends an item to `receive`, which must not raise."""
        return partial(self._send, receive)

    def _send(self, receive: Callable[[T], None], item: T) -> None:
        self._items.append((receive, item))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the items are counted: one that comes later wakes the loop again
        for _ in range(len(self._items)):
            receive, item = self._items.popleft()
            receive(item)
