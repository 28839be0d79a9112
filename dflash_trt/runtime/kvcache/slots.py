# SPDX-License-Identifier: Apache-2.0
"""Allocates and frees the slots and pages of requests, each of target and drafter together."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.runtime.kvcache.prefix_index import ROOT, PrefixIndex


class Reservation(NamedTuple):
    """A request's slot and pages."""

    slot: int
    pages: list[int]
    """Pages for the longest sequence that the request can become, in order."""
    num_cached_tokens: int
    """Prompt tokens that both caches already hold, in the first pages."""


@dataclass(slots=True)
class _Slot:
    """A running request's pages, and how far they are filled."""

    pages: list[int]
    prompt_ids: Sequence[int]
    num_shared: int
    """Leading pages that are full, and so in the index."""
    entry: int
    """Number of the last of them in the index, or ROOT."""
    unshared: list[int] = field(default_factory=list)
    """Tokens in the page after them."""


class FreePages:
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
        self.index = PrefixIndex()
        self._num_pages = num_tokens // TOKENS_PER_PAGE
        self._pool = FreePages(self._num_pages)
        self._free = list(range(num_slots))  # a heap: the lowest first, so that running slots stay neighbours
        self._slots: dict[int, _Slot] = {}
        self._holders: Counter[int] = Counter()
        self._unheld: dict[int, None] = {}
        """Pages of the index that no slot holds, the least recently used first."""

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
        return (self._pool.num_free + len(self._unheld)) * TOKENS_PER_PAGE

    def has_room(self, num_tokens: int) -> bool:
        """Whether there is room for `num_tokens` tokens even if none of them is cached."""
        return bool(self._free) and num_pages_for(num_tokens) * TOKENS_PER_PAGE <= self.free_tokens

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] = ()) -> Reservation:
        """Reserves a slot and pages for `num_tokens` tokens, for which there is room.

        They begin with the cached pages of `prompt_ids`, but for the last token, whose logits a pass must compute.
        """
        slot = heapq.heappop(self._free)
        entries = self._cached(prompt_ids)
        cached = [page for _, page in entries]
        for page in cached:
            self._unheld.pop(page, None)
        pages = cached + self._take(num_pages_for(num_tokens) - len(cached))
        self._holders.update(pages)
        self._slots[slot] = _Slot(pages, prompt_ids, len(cached), entries[-1][0] if entries else ROOT)
        return Reservation(slot, pages, len(cached) * TOKENS_PER_PAGE)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Notes a slot's next tokens, which both caches now hold; other requests may share each page that they fill."""
        if not self.prefix_caching:
            return
        held = self._slots[slot]
        held.unshared += token_ids
        while len(held.unshared) >= TOKENS_PER_PAGE:
            held.entry = self.index.add(held.entry, held.unshared[:TOKENS_PER_PAGE], held.pages[held.num_shared])
            held.num_shared += 1
            del held.unshared[:TOKENS_PER_PAGE]

    def free(self, slot: int) -> None:
        """Frees an allocated slot and its pages; full ones stay cached until there is need of them."""
        for page in reversed(self._slots.pop(slot).pages):  # so that a prefix's end is evicted before its beginning
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self.index:
                    self._unheld[page] = None
                else:
                    self._pool.give([page])
        heapq.heappush(self._free, slot)

    def _cached(self, prompt_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Entries, and pages, of a prompt's cached prefix."""
        return list(self.index.find(prompt_ids[:-1])) if self.prefix_caching else []

    def is_computing(self, prompt_ids: Sequence[int]) -> bool:
        """Whether running requests are computing the first page of a prompt that is not cached.

        Waiting for it pays: prompts are read oldest first, so this one would seldom have been read before that.
        """
        end = (len(self._cached(prompt_ids)) + 1) * TOKENS_PER_PAGE
        if not self.prefix_caching or end >= len(prompt_ids):
            return False
        ahead = [held for held in self._slots.values() if held.prompt_ids[:end] == prompt_ids[:end]]
        return bool(ahead) and all(held.num_shared * TOKENS_PER_PAGE < end for held in ahead)

    def _take(self, count: int) -> list[int]:
        """`count` free pages; evicts cached ones where it must."""
        while self._pool.num_free < count:
            page = next(iter(self._unheld))
            del self._unheld[page]
            self.index.remove(page)
            self._pool.give([page])
        return self._pool.take(count)
