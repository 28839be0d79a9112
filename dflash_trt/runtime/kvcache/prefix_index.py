# SPDX-License-Identifier: Apache-2.0
"""Full pages by the tokens in them and before them, as in vLLM's automatic prefix caching.

Where vLLM has a hash, the key is the entry of the page before, whose number is never used again, and the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from dflash_trt.runtime.kvcache.page_table import TOKENS_PER_PAGE

Key = tuple[int, tuple[int, ...]]
"""The number of the entry before, and a page's tokens."""
ROOT = 0
"""The number before the first page."""


class PageWatcher(Protocol):
    """Observer of an index's entries."""

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Called for a new entry with a page's tokens, behind the entry `before` or ROOT."""

    def removed(self, number: int) -> None:
        """Called when an entry is evicted."""


class PrefixIndex:
    """One entry for each page that may be shared."""

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
        """The number of the entry with `token_ids`, a page's, behind the entry `before`; `page`, if there was none."""
        key = (before, tuple(token_ids))
        if key not in self._entries:
            self._entries[key] = next(self._numbers), page
            self._keys[page] = key
            if self.watcher is not None:
                self.watcher.stored(self._entries[key][0], before, token_ids)
        return self._entries[key][0]

    def remove(self, page: int) -> None:
        """Forgets a page. What was behind it is no longer found."""
        number, _ = self._entries.pop(self._keys.pop(page))
        if self.watcher is not None:
            self.watcher.removed(number)
