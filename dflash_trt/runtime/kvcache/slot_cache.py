# SPDX-License-Identifier: Apache-2.0
"""The target's cache in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt.device.upload import uploaded
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.kvcache.page_memory import FIRST_PAGES, grown, zeros
from dflash_trt.runtime.kvcache.page_table import PageTable


class SlotCache:
    """K and V of each layer as [G, pages, ...]: a KV head's pages lie together, as attention reads them."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.table = PageTable(num_slots)
        self._device = device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """K and V by layer, once it has seen a token."""
        self.num_moves = 0
        """How often a layer moved to another address to grow."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in one sequence, over the layers that have seen one."""
        caches = (cache for layer in self.layers.values() for cache in layer)
        return sum(cache[:, 0].numel() * cache.element_size() for cache in caches) // TOKENS_PER_PAGE

    def layer(
        self, index: int, num_heads: int, k_page: tuple[int, int], v_page: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [G, pages, *page] each, with room for all pages of the table."""
        if index not in self.layers:
            shapes = ((num_heads, max(FIRST_PAGES, self.table.num_pages), *page) for page in (k_page, v_page))
            k, v = (zeros(shape, dtype, self._device) for shape in shapes)
            self.layers[index] = k, v
        else:
            self._grow(index)
        return self.layers[index]

    def make_room(self, num_pages: int = 0) -> None:
        """Makes room in every layer for all pages of the table, and `num_pages` at least."""
        for index in self.layers:
            self._grow(index, num_pages)

    def _grow(self, index: int, num_pages: int = 0) -> None:
        num_pages = max(num_pages, self.table.num_pages)
        if num_pages > self.layers[index][0].shape[1]:
            k, v = (grown(cache, 1, num_pages, self.table.written) for cache in self.layers[index])
            self.layers[index] = k, v
            self.num_moves += 1

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages that earlier requests have written."""
        if pages:
            index = uploaded(torch.tensor(pages), self._device)
            for cache in (cache for layer in self.layers.values() for cache in layer):
                cache.index_fill_(1, index, 0)
