# SPDX-License-Identifier: Apache-2.0
"""Who may run: slots and cache room of target and drafter, allocated and freed."""

from __future__ import annotations

import heapq

DEFAULT_CACHE_GIB = 4.0
"""Room for both caches."""


class SlotPool:
    """Slots 0 .. num_slots - 1, and a number of cached tokens that all requests share.

    A request reserves the longest it can become, so that a request that runs is never short of room.
    """

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.num_slots = num_slots
        self.num_tokens = num_tokens
        self._free = list(range(num_slots))  # a heap: the lowest first, so that running slots stay neighbours
        self._reserved: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def free_tokens(self) -> int:
        """Tokens that nobody has reserved."""
        return self.num_tokens - sum(self._reserved.values())

    def fits(self, num_tokens: int) -> bool:
        """Whether `allocate` would succeed now."""
        return bool(self._free) and num_tokens <= self.free_tokens

    def allocate(self, num_tokens: int) -> int:
        """A free slot, with room for `num_tokens` tokens; ValueError when there is none."""
        if not self.fits(num_tokens):
            raise ValueError(
                f"expected a free slot with room for {num_tokens} tokens, found {self.free_slots} slots"
                f" and {self.free_tokens} tokens free"
            )
        slot = heapq.heappop(self._free)
        self._reserved[slot] = num_tokens
        return slot

    def free(self, slot: int) -> None:
        """Frees an allocated slot and its room; ValueError for one that is not allocated."""
        if slot not in self._reserved:
            raise ValueError(f"slot {slot}: expected an allocated slot, found it free")
        del self._reserved[slot]
        heapq.heappush(self._free, slot)
