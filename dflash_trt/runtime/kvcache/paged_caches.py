# SPDX-License-Identifier: Apache-2.0
"""The caches of target and drafter in pages, and the pages of each slot: TensorRT-LLM's block offsets, as lists.

Page p is rows p * TOKENS_PER_PAGE and on of each layer's K and V, of target and drafter alike.
"""

from __future__ import annotations

import errno
import itertools
import mmap
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from math import prod

import numpy as np
import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.errors import RequestError

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


class SlotCache:
    """K and V of each layer as [G, pages, ...]: a KV head's pages lie together, as attention reads them."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.table = PageTable(num_slots)
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_moves = 0
        """How often a layer went to another address, because it had to grow."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in one sequence, over the layers that have seen one."""
        caches = (cache for layer in self._layers.values() for cache in layer)
        return sum(cache[:, 0].numel() * cache.element_size() for cache in caches) // TOKENS_PER_PAGE

    def layer(
        self, index: int, num_heads: int, k_page: tuple[int, int], v_page: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [G, pages, *page] each, with room for all pages of the table."""
        if index not in self._layers:
            shapes = ((num_heads, max(FIRST_PAGES, self.table.num_pages), *page) for page in (k_page, v_page))
            k, v = (zeros(shape, dtype, self._device) for shape in shapes)
            self._layers[index] = k, v
        else:
            self._grow(index)
        return self._layers[index]

    def make_room(self, num_pages: int = 0) -> None:
        """Makes room in every layer for all pages of the table, and `num_pages` at least."""
        for index in self._layers:
            self._grow(index, num_pages)

    def _grow(self, index: int, num_pages: int = 0) -> None:
        num_pages = max(num_pages, self.table.num_pages)
        if num_pages > self._layers[index][0].shape[1]:
            k, v = (grown(cache, 1, num_pages, self.table.written) for cache in self._layers[index])
            self._layers[index] = k, v
            self.num_moves += 1

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages that others have written."""
        if pages:
            index = uploaded(torch.tensor(pages), self._device)
            for cache in (cache for layer in self._layers.values() for cache in layer):
                cache.index_fill_(1, index, 0)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ContextCache:
    """K and V [pages, L, TOKENS_PER_PAGE, G, D], FLOAT, BF16 or FP8; scales are part of the graphs."""

    def __init__(
        self, spec: DraftSpec, num_slots: int, num_rows: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """With `num_rows` a slot holds at most that many, and all pages are allocated at once."""
        self._num_rows = num_rows
        num_pages = num_slots * num_pages_for(num_rows) if num_rows else max(FIRST_PAGES, num_slots)
        shape = (num_pages, spec.num_layers, TOKENS_PER_PAGE, spec.num_key_value_heads, spec.head_dim)
        # First, because it refuses more slots than memory holds.
        self.k, self.v = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.table = PageTable(num_slots)

    @property
    def lengths(self) -> list[int]:
        """Number of rows in each slot."""
        return self.table.lengths

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row of one slot."""
        return self.k[0, :, 0].nbytes + self.v[0, :, 0].nbytes

    def rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """The slot's injected k and v, each [L, C, G, D]."""
        pages, length = self.table.pages[slot], self.lengths[slot]
        k, v = (cache[pages].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (self.k, self.v))
        return k, v

    @torch.inference_mode()
    def reserve(self, slot: int, pages: Sequence[int], num_rows: int) -> None:
        """Gives an empty slot its pages, which hold its first `num_rows` rows already."""
        self._clear(self.table.reserve(slot, pages, num_rows))

    def extend(self, slots: Sequence[int], num_rows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Lengthens the slots; position, page and row in the page of each new row. May replace `k` and `v`.

        Raises RequestError when a slot would overflow.
        """
        size = TOKENS_PER_PAGE
        for slot, count in zip(slots, num_rows, strict=True):
            if self._num_rows and self.lengths[slot] + count > self._num_rows:
                raise RequestError(
                    f"context of slot {slot}: expected at most {self._num_rows} rows, for which the plan was built,"
                    f" found {self.lengths[slot]} and {count} new ones",
                    hint="build the plan with a larger --max-seq-len",
                )
        pages: list[int] = []
        positions: list[int] = []
        for slot, count in zip(slots, num_rows, strict=True):
            self._clear(self.table.cover(slot, count))
            new = range(self.lengths[slot], self.lengths[slot] + count)
            pages += [self.table.pages[slot][position // size] for position in new]
            positions += new
            self.lengths[slot] += count
        self.make_room(self.table.num_pages)
        return positions, pages, [position % size for position in positions]

    def make_room(self, num_pages: int) -> None:
        """Makes room for `num_pages`, where not all are there at once. May replace `k` and `v`."""
        if num_pages > len(self.k) and not self._num_rows:
            self.k, self.v = (grown(cache, 0, num_pages, self.table.written) for cache in (self.k, self.v))

    def write(self, pages: Tensor, offsets: Tensor, kv: Tensor) -> None:
        """Writes rows kv [T, 2, L, G, D] to `pages` and the `offsets` in them, [T] INT32, as `extend` returns them."""
        tensors = (kv, pages, offsets, self.k, self.v)
        if not self.k.is_cuda:
            if self.k.dtype == torch.float32:  # NumPy's cross over in half the time
                _C.kv_injection_append_reference(*(tensor.numpy() for tensor in tensors))
            else:
                _C.kv_injection_append_reference(*tensors)
        elif _C.cuda_architectures():
            with torch.cuda.device(self.k.device):
                _C.kv_injection_append(*tensors, torch.cuda.current_stream().cuda_stream)
        else:
            for cache, rows in zip((self.k, self.v), kv.unbind(1), strict=True):
                _bytes(cache)[pages, :, offsets] = _bytes(rows)

    def page_ids(self, slots: Sequence[int], num_rows: int) -> list[list[int]]:
        """Pages [B, M] that hold up to `num_rows` rows of each slot; a shorter slot repeats its first page."""
        num_pages = max(1, num_pages_for(num_rows))
        slot_pages = []
        for slot in slots:
            pages = self.table.pages[slot][: min(num_pages, num_pages_for(self.lengths[slot]))] or [0]
            slot_pages.append(pages + pages[:1] * (num_pages - len(pages)))
        return slot_pages

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Empties a slot."""
        self.table.release(slot)

    def _clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros: a masked row still counts as 0 * value, and 0 * NaN is NaN."""
        for page in pages:
            for cache in (self.k, self.v):
                _bytes(cache[page]).zero_()


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 and BF16 as integers, because neither torch nor numpy moves those by index everywhere."""
    return tensor.view(_INTEGERS[tensor.element_size()])
