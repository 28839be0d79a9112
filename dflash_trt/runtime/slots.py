# SPDX-License-Identifier: Apache-2.0
"""Who may run: slots and pages of the caches of target and drafter, allocated and freed."""

from __future__ import annotations

import heapq

from dflash_trt.pages.page_pool import PagePool
from dflash_trt.pages.page_table import TOKENS_PER_PAGE, num_pages_for

DEFAULT_CACHE_GIB = 4.0
"""Room for both caches."""


class SlotPool:
    """Slots 0 .. num_slots - 1, and pages that all requests share, each of target and drafter together.

    A request reserves pages for the longest it can become, so that a request that runs is never short of room.
    """

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        """As many whole pages as `num_tokens` tokens fill."""
        self.num_slots = num_slots
        self._num_pages = num_tokens // TOKENS_PER_PAGE
        self._pool = PagePool(self._num_pages)
        self._free = list(range(num_slots))  # a heap: the lowest first, so that running slots stay neighbours
        self._pages: dict[int, list[int]] = {}

    @classmethod
    def for_each_slot(cls, num_slots: int, num_tokens: int) -> SlotPool:
        """One in which every slot has room for `num_tokens` tokens."""
        return cls(num_slots, num_slots * num_pages_for(num_tokens) * TOKENS_PER_PAGE)

    @property
    def num_tokens(self) -> int:
        """That fill all pages."""
        return self._num_pages * TOKENS_PER_PAGE

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def free_tokens(self) -> int:
        """That fill the pages which nobody has reserved."""
        return self._pool.num_free * TOKENS_PER_PAGE

    def fits(self, num_tokens: int) -> bool:
        """Whether `allocate` would succeed now."""
        return bool(self._free) and num_pages_for(num_tokens) <= self._pool.num_free

    def allocate(self, num_tokens: int) -> tuple[int, list[int]]:
        """A free slot, and pages for `num_tokens` tokens; ValueError when there is none."""
        if not self.fits(num_tokens):
            raise ValueError(
                f"expected a free slot with room for {num_tokens} tokens, found {self.free_slots} slots"
                f" and {self.free_tokens} tokens free"
            )
        slot = heapq.heappop(self._free)
        self._pages[slot] = self._pool.take(num_pages_for(num_tokens))
        return slot, self._pages[slot]

    def free(self, slot: int) -> None:
        """Frees an allocated slot and its pages; ValueError for one that is not allocated."""
        if slot not in self._pages:
            raise ValueError(f"slot {slot}: expected an allocated slot, found it free")
        self._pool.give(self._pages.pop(slot))
        heapq.heappush(self._free, slot)
