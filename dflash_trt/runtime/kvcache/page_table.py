# SPDX-License-Identifier: Apache-2.0
"""The pages of each slot: TensorRT-LLM's block offsets, as lists.

Page p is rows p * TOKENS_PER_PAGE and on of each layer's K and V, of target and drafter alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import chain, islice

from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for


class PageTable:
    """The pages of each slot's sequence, in order, and how many tokens it has.

    A slot gets its pages from `reserve`, or takes free ones as it grows, if no other table allots pages of the cache.
    """

    def __init__(self, num_slots: int) -> None:
        self.lengths = [0] * num_slots
        self.pages: list[list[int]] = [[] for _ in range(num_slots)]
        self.written: set[int] = set()
        """Pages that hold more than zeros."""
        self.num_pages = 0
        """One more than the highest page that was ever written."""
        self._reserved: set[int] = set()

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> list[int]:
        """Gives an empty slot its `pages`, the first of which hold its first `num_tokens` tokens, whole pages of them.

        Returns the other pages that need clearing: a masked row still counts as 0 * value, and 0 * NaN is NaN.
        """
        assert not self.lengths[slot], f"slot {slot} is not empty"
        assert num_tokens % TOKENS_PER_PAGE == 0, "a page that is not full has one owner"
        self._reserved.add(slot)
        self.lengths[slot] = num_tokens
        self.pages[slot] = list(pages)
        return self._stale(pages[num_tokens // TOKENS_PER_PAGE :])

    def cover(self, slot: int, num_tokens: int) -> list[int]:
        """Makes room for `num_tokens` more tokens in a slot; returns the pages that need clearing before."""
        pages, end = self.pages[slot], self.lengths[slot] + num_tokens
        missing = num_pages_for(end) - len(pages)
        stale: list[int] = []
        if missing > 0:
            assert slot not in self._reserved, f"slot {slot} outgrows its reservation"
            held = set(chain(*self.pages))
            taken = list(islice((page for page in itertools.count() if page not in held), missing))
            stale = self._stale(taken)
            pages += taken
        for page in pages[self.lengths[slot] // TOKENS_PER_PAGE : num_pages_for(end)]:
            if page not in self.written:
                self.written.add(page)
                self.num_pages = max(self.num_pages, page + 1)
        return stale

    def rows(self, slot: int, num_tokens: int) -> list[int]:
        """Rows of the next `num_tokens` tokens, for which there is room."""
        pages, begin, size = self.pages[slot], self.lengths[slot], TOKENS_PER_PAGE
        return [pages[i // size] * size + i % size for i in range(begin, begin + num_tokens)]

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._reserved.discard(slot)
        self.lengths[slot], self.pages[slot] = 0, []

    def _stale(self, pages: Sequence[int]) -> list[int]:
        stale = [page for page in pages if page in self.written]
        self.written.difference_update(stale)
        return stale
