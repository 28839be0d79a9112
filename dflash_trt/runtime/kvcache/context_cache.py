# SPDX-License-Identifier: Apache-2.0
"""The drafter's context in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.errors import RequestError
from dflash_trt.runtime.kvcache.page_memory import FIRST_PAGES, grown, zeros
from dflash_trt.runtime.kvcache.page_table import PageTable

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ContextCache:
    """K and V [pages, L, TOKENS_PER_PAGE, G, D], FLOAT, BF16 or FP8; scales are part of the graphs."""

    def __init__(
        self, spec: DraftSpec, num_slots: int, num_rows: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """With `num_rows` a slot holds at most that many, and all pages are allocated at once."""
        self.max_rows = num_rows
        """Rows of one slot; None: as many as memory holds."""
        num_pages = num_slots * num_pages_for(num_rows) if num_rows else max(FIRST_PAGES, num_slots)
        shape = (num_pages, spec.num_layers, TOKENS_PER_PAGE, spec.num_key_value_heads, spec.head_dim)
        # First, because it refuses more slots than memory holds.
        self.k, self.v = zeros(shape, dtype, device), zeros(shape, dtype, device)
        self.table = PageTable(num_slots)

    @property
    def max_tokens(self) -> int | None:
        """Rows of all pages where none can be added; None where the cache grows."""
        return len(self.k) * TOKENS_PER_PAGE if self.max_rows else None

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
            if self.max_rows and self.lengths[slot] + count > self.max_rows:
                raise RequestError(
                    f"context of slot {slot}: expected at most {self.max_rows} rows, for which the plan was built,"
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
        """Makes room for `num_pages`, unless all were allocated at once. May replace `k` and `v`."""
        if num_pages > len(self.k) and not self.max_rows:
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
