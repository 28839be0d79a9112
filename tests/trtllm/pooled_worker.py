# SPDX-License-Identifier: Apache-2.0
"""The mimicked worker with its context in the cache manager's pool of pages.

Written from _torch/speculative/dflash.py at 414ba69f42c2 and 8d62b3e5 and the pool's two layouts: V1 slices a layer out
of each page, V2 is a view of every layer over the whole pool, in which a page's entry is its slot times the layers.
Entries that are not allocated become 0, a page of somebody else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.trtllm.worker import Worker


class PooledWorker(Worker):
    """Rows of the table are the batch's, prompts first; requests keep their pages wherever in it they stand."""

    BACKEND = "TRTLLM"

    def __init__(self, drafter: Any, *, version: str, tokens_per_block: int, seed: int = 0, **sizes: int) -> None:
        self._version = version
        self._size = tokens_per_block
        self._random = torch.Generator().manual_seed(seed)
        self._start = 0
        super().__init__(drafter, **sizes)

    def allocate(self, max_batch: int) -> None:
        """A pool, its views, and the table that every batch is written into; pages are NaN until they are written."""
        drafter = self.drafter
        drafter._build_fused_kv_buffers()
        L, G, D = drafter._num_attn_layers, drafter._num_kv_heads, drafter._head_dim
        blocks = -(-(self.max_ctx + self.K + 1) // self._size)
        num_pages = (max_batch + 1) * blocks + 3
        dtype = drafter.fc.weight.dtype
        self.pool = torch.full((num_pages, L, 2, G, self._size, D), torch.nan, dtype=dtype)
        self.views = [self.pool[:, layer] for layer in range(L)]
        if self._version == "V2":
            part = self.pool[0, 0].numel()
            flat, whole = self.pool.flatten(), num_pages * L
            sizes, strides = self.pool.shape[2:], (part, *self.pool.stride()[2:])
            self.views = [flat.as_strided((whole - layer, *sizes), strides, layer * part) for layer in range(L)]
        self.table = torch.zeros(max_batch + 1, blocks, dtype=torch.int32)
        self._free = torch.randperm(num_pages, generator=self._random).tolist()
        self._pages: dict[int, list[int]] = {slot: [] for slot in range(max_batch + 1)}
        self.ctx_len = torch.zeros(max_batch + 1, dtype=torch.long)

    def cache_bytes(self) -> int:
        return self.pool.nbytes

    def share(self, slot: int, source: int, num_tokens: int) -> None:
        """A prefix hit: whole pages of another request, whose rows stand where this one's would."""
        assert num_tokens % self._size == 0
        self._pages[slot] = self._pages[source][: num_tokens // self._size]
        self.ctx_len[slot] = num_tokens

    def release(self, slot: int) -> None:
        """Pages that nobody else has go back; what is in them stays until they are written again."""
        super().release(slot)
        given, self._pages[slot] = self._pages[slot], []
        held = {page for pages in self._pages.values() for page in pages}
        self._free += [page for page in given if page not in held]

    def _store(self, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for slot, position, *row in zip(slots.tolist(), positions.tolist(), k, v, strict=True):
            pages = self._pages[slot]
            while len(pages) <= position // self._size:
                pages.append(self._free.pop())
            for kv, values in enumerate(row):  # [L, G, D]
                self.pool[pages[position // self._size], :, kv, :, position % self._size] = values

    def _context(self, slots: Tensor) -> dict[str, Any]:
        self.table.zero_()
        self._start = int(torch.randint(len(self.table) - len(slots) + 1, (), generator=self._random))  # its prompts
        for row, slot in enumerate(slots.tolist(), self._start):
            entries = torch.tensor(self._pages[slot], dtype=torch.int32)
            self.table[row, : len(entries)] = entries * (len(self.views) if self._version == "V2" else 1)
        return {
            "ctx_k_cache": None, "ctx_v_cache": None, "ctx_cache_batch_idx": self._start + torch.arange(len(slots)),
            "ctx_kv_cache": self.views, "ctx_page_table": self.table,
        }  # fmt: skip

    def _rows_start(self) -> dict[str, Any]:
        return dict.fromkeys(super()._rows_start(), self._start)
