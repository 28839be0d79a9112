# SPDX-License-Identifier: Apache-2.0
"""Allocates and frees slots and pages of the caches of target and drafter."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for

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
        """The number of the entry with a page's `token_ids` after the entry `before`; `page` if there was none."""
        key = (before, tuple(token_ids))
        if key not in self._entries:
            self._entries[key] = next(self._numbers), page
            self._keys[page] = key
            if self.watcher is not None:
                self.watcher.stored(self._entries[key][0], before, token_ids)
        return self._entries[key][0]

    def remove(self, page: int) -> None:
        """Forgets a page. Pages after it are no longer found."""
        number, _ = self._entries.pop(self._keys.pop(page))
        if self.watcher is not None:
            self.watcher.removed(number)


class Reservation(NamedTuple):
    """A request's slot and pages."""

    slot: int
    pages: list[int]
    """Pages for the longest sequence that the request can become, in order."""
    num_cached_tokens: int
    """Prompt tokens that both caches already hold, in the first pages."""


class _FreePages:
    """Free pages of 0 .. num_pages - 1; gives the lowest first, so that the caches grow late."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = num_pages
        self._returned: list[int] = []  # a heap; all from `_never_taken` on are free, too
        self._never_taken = 0

    def take(self, count: int) -> list[int]:
        """`count` <= `num_free` pages."""
        assert count <= self.num_free, "more pages than are free"
        self.num_free -= count
        pages = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        begin, self._never_taken = self._never_taken, self._never_taken + count - len(pages)
        return [*pages, *range(begin, self._never_taken)]

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            heapq.heappush(self._returned, page)
            self.num_free += 1


class SlotPool:
    """Slots 0 .. num_slots - 1, and pages that all requests share, each of target and drafter together.

    A request reserves pages for its longest sequence, so a running request never lacks room. With prefix caching, full
    pages outlive their requests; when room is needed, the least recently used are evicted first.
    """

    def __init__(self, num_slots: int, num_tokens: int, *, prefix_caching: bool = False) -> None:
        """Makes a pool of the whole pages that `num_tokens` tokens fill."""
        self.num_slots = num_slots
        self.prefix_caching = prefix_caching
        self._num_pages = num_tokens // TOKENS_PER_PAGE
        self._pool = _FreePages(self._num_pages)
        self._free = list(range(num_slots))  # a heap: the lowest first, so that running slots stay neighbours
        self._pages: dict[int, list[int]] = {}
        self._holders: Counter[int] = Counter()
        self.index = PrefixIndex()
        self._unheld: dict[int, None] = {}
        """Unused pages of the index, the least recently used first."""
        self._published: dict[int, tuple[int, int]] = {}
        """By slot: how many of its pages are in the index, and the number of the last one's entry."""

    @classmethod
    def for_each_slot(cls, num_slots: int, num_tokens: int) -> SlotPool:
        """A pool in which every slot has room for `num_tokens` tokens."""
        return cls(num_slots, num_slots * num_pages_for(num_tokens) * TOKENS_PER_PAGE)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in all pages."""
        return self._num_pages * TOKENS_PER_PAGE

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def free_tokens(self) -> int:
        """Tokens that fit in the unreserved pages."""
        return self._num_free_pages * TOKENS_PER_PAGE

    @property
    def _num_free_pages(self) -> int:
        return self._pool.num_free + len(self._unheld)

    def fits(self, num_tokens: int) -> bool:
        """Whether `allocate` would succeed now, even with nothing cached."""
        return bool(self._free) and num_pages_for(num_tokens) <= self._num_free_pages

    def num_cached(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of a prompt in shareable full pages, without its last token, whose logits a pass must compute."""
        return TOKENS_PER_PAGE * len(list(self.index.find(prompt_ids[:-1])))

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] = ()) -> Reservation:
        """A free slot and pages for `num_tokens` tokens, which must fit, that begin with `prompt_ids`."""
        assert self.fits(num_tokens), f"there is no free slot with room for {num_tokens} tokens"
        slot = heapq.heappop(self._free)
        cached_entries = list(self.index.find(prompt_ids[:-1])) if self.prefix_caching else []
        cached = [page for _, page in cached_entries]
        for page in cached:
            self._unheld.pop(page, None)
        count = num_pages_for(num_tokens) - len(cached)
        self._make_room(count)
        pages = cached + self._pool.take(count)
        self._holders.update(pages)
        self._pages[slot] = pages
        self._published[slot] = len(cached_entries), cached_entries[-1][0] if cached_entries else ROOT
        return Reservation(slot, pages, len(cached) * TOKENS_PER_PAGE)

    def unpublished(self, slot: int, num_tokens: int) -> range:
        """Positions of the full pages among the slot's first `num_tokens` tokens that were not published yet."""
        begin = self._published[slot][0] * TOKENS_PER_PAGE
        return range(begin, num_tokens // TOKENS_PER_PAGE * TOKENS_PER_PAGE if self.prefix_caching else begin)

    def publish(self, slot: int, token_ids: Sequence[int]) -> None:
        """Lets others share the slot's next full pages, which hold `token_ids` in target and drafter."""
        num_published, number = self._published[slot]
        for begin in range(0, len(token_ids) - TOKENS_PER_PAGE + 1, TOKENS_PER_PAGE):
            number = self.index.add(
                number, token_ids[begin : begin + TOKENS_PER_PAGE], self._pages[slot][num_published]
            )
            num_published += 1
        self._published[slot] = num_published, number

    def forget(self) -> None:
        """Drops the prefix index: another decoder has overwritten the pages."""
        for page in self._unheld:
            self.index.remove(page)
        self._pool.give(self._unheld)
        self._unheld = {}
        for page in self._holders:
            if page in self.index:
                self.index.remove(page)

    def free(self, slot: int) -> None:
        """Frees an allocated slot and its pages."""
        for page in reversed(self._pages.pop(slot)):  # so that the end of a prefix is evicted before its beginning
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self.index:
                    self._unheld[page] = None
                else:
                    self._pool.give([page])
        del self._published[slot]
        heapq.heappush(self._free, slot)

    def _make_room(self, count: int) -> None:
        while self._pool.num_free < count:
            page = next(iter(self._unheld))
            del self._unheld[page]
            self.index.remove(page)
            self._pool.give([page])
