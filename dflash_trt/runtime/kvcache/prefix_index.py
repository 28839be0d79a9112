# SPDX-License-Identifier: Apache-2.0
"""The index of pages that prompts may share, by the tokens that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from dflash_trt.engine.signatures import TOKENS_PER_PAGE

Key = tuple[int, tuple[int, ...]]
"""The number of the entry before, and a page's tokens."""
ROOT = 0
"""The number before the first page."""


class PageWatcher(Protocol):
    """Listener for the pages that prompts may share."""

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Called for a new entry, with the tokens of its page; `before` is the entry that it follows, or ROOT."""

    def removed(self, number: int) -> None:
        """Called when an entry can no longer be found."""


class PrefixIndex:
    """Full pages by the tokens in them and before them, as in vLLM's automatic prefix caching.

    Where vLLM has a hash, the key is the entry of the page before, whose number is never used again, and the tokens.
    """

    def __init__(self) -> None:
        self.watcher: PageWatcher | None = None
        self._entries: dict[Key, tuple[int, int]] = {}  # number and page
        self._keys: dict[int, Key] = {}
        self._numbers = count(ROOT + 1)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Number and page of each full page of `token_ids` that is known, up to the first that is not."""
        number = ROOT
        for begin in range(0, len(token_ids) - TOKENS_PER_PAGE + 1, TOKENS_PER_PAGE):
            entry = self._entries.get((number, tuple(token_ids[begin : begin + TOKENS_PER_PAGE])))
            if entry is None:
                return
            number = entry[0]
            yield entry

    def add(self, before: int, token_ids: Sequence[int], page: int) -> int:
        """Number of the entry for a page's `token_ids` after the entry `before`; made for `page` if there is none."""
        key = (before, tuple(token_ids))
        if key not in self._entries:
            self._entries[key] = next(self._numbers), page
            self._keys[page] = key
            if self.watcher is not None:
                self.watcher.stored(self._entries[key][0], before, token_ids)
        return self._entries[key][0]

    def remove(self, page: int) -> None:
        """Forgets a page; pages after it can no longer be found."""
        number, _ = self._entries.pop(self._keys.pop(page))
        if self.watcher is not None:
            self.watcher.removed(number)
