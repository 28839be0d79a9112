# SPDX-License-Identifier: Apache-2.0
"""The pages of each slot's sequence: TensorRT-LLM's block offsets [slots, max_pages], as lists.

Page p is rows p * TOKENS_PER_PAGE and on of each layer's K and V, of target and drafter alike.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count, islice
from math import prod

import numpy as np
import torch
from torch import Tensor

from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for

FIRST_PAGES = 16
"""Pages that a new cache has room for."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU a mapping of its own, whose pages take memory when they are written, and which goes back to the
    system.

    torch.zeros writes all of it, and so does calloc where it takes freed memory. MemoryError where there is no room.
    """
    num_bytes = max(1, prod(shape) * dtype.itemsize)
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.frombuffer(_mapped(num_bytes), dtype=np.uint8)).view(dtype).view(*shape)


def _mapped(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{num_bytes} bytes") from None


def grown(cache: Tensor, dim: int, num_pages: int, written: Collection[int]) -> Tensor:
    """A copy with room for `num_pages` pages, and half as many as before at least; only `written` ones are copied."""
    shape = list(cache.shape)
    shape[dim] = max(num_pages, shape[dim] + shape[dim] // 2)
    new = zeros(shape, cache.dtype, cache.device)
    for begin, end in _runs(sorted(page for page in written if page < cache.shape[dim])):
        new.narrow(dim, begin, end - begin).copy_(cache.narrow(dim, begin, end - begin))
    return new


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of pages that lie one behind the other; `pages` in order."""
    begin = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[begin], pages[i - 1] + 1
            begin = i


class PageTable:
    """The pages of each slot's sequence, in order, and how many tokens it has.

    A slot gets its pages from `reserve`, or takes free ones as it grows, which needs the cache for itself.
    """

    def __init__(self, num_slots: int) -> None:
        self.lengths = [0] * num_slots
        self.pages: list[list[int]] = [[] for _ in range(num_slots)]
        self.written: set[int] = set()
        """Pages that hold more than zeros."""
        self.num_pages = 0
        """One more than the highest page that was ever written."""
        self._reserved: set[int] = set()
        self._user: object = None

    def claim(self, user: object) -> bool:
        """Claims the pages; whether only `user` has written since its last claim."""
        was_there = self._user is user
        self._user = user
        return was_there

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
            self._user = None
            held = set(chain(*self.pages))
            taken = list(islice((page for page in count() if page not in held), missing))
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
