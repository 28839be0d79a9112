# SPDX-License-Identifier: Apache-2.0
"""Where a context cache lies in memory: the inputs context_pointers and context_layout (docs/kv_injection.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES
from dflash_trt.errors import EngineError

ALIGNMENT = 16
MAX_ROW_STRIDE = (2**31 - 1) // 16  # bytes; the kernel finds 16 rows at a time


class ContextLayout(NamedTuple):
    """Addresses, strides and size of a context cache."""

    addresses: tuple[int, ...]
    """[L]: of the first page's K."""
    page_size: int
    page_stride: int
    """From a page to the next of one layer; all strides are in bytes."""
    kv_stride: int
    row_stride: int
    head_stride: int
    num_pages: int
    """The plugin returns NaN for requests whose page table entries are not below this."""

    @classmethod
    def of_caches(cls, k_cache: Tensor, v_cache: Tensor) -> ContextLayout:
        """Layout of K and V [pages, L, rows, G, D]; a dense cache has one page a slot."""
        page, layer, row, head, _ = (stride * k_cache.itemsize for stride in k_cache.stride())
        first, L = k_cache.data_ptr(), k_cache.shape[1]
        addresses = tuple(range(first, first + L * layer, layer))
        return cls(addresses, k_cache.shape[2], page, v_cache.data_ptr() - first, row, head, len(k_cache))

    @classmethod
    def of_layers(cls, layers: Sequence[Tensor]) -> ContextLayout:
        """Layout of views [pages, 2, G, rows, D], one a layer, with equal strides."""
        page, kv, head, row, _ = (stride * layers[0].itemsize for stride in layers[0].stride())
        num_pages = min(map(len, layers))  # views of later layers end earlier where pages of all layers alternate
        addresses = tuple(layer.data_ptr() for layer in layers)
        return cls(addresses, layers[0].shape[3], page, kv, row, head, num_pages)

    def check(self, num_pages: int) -> None:
        """Raises EngineError for a layout that the plugin rejects with a page table of `num_pages` columns.

        The plugin itself could only answer NaN: layouts are on the GPU.
        """
        sizes = PAGE_SIZES if num_pages > 1 else range(1, MAX_CONTEXT + 1)
        if self.page_size not in sizes:
            expected = "16, 32 or 64" if num_pages > 1 else f"at most {MAX_CONTEXT}"
            raise EngineError(f"context cache: expected pages of {expected} rows, found {self.page_size}")
        if odd := [value for value in (*self.addresses, *self.layout[1:-1]) if value % ALIGNMENT]:
            raise EngineError(f"context cache: expected addresses and strides that {ALIGNMENT} divides, found {odd[0]}")
        if not 0 <= self.row_stride <= MAX_ROW_STRIDE:
            raise EngineError(
                f"context cache: expected a row stride of 0 to {MAX_ROW_STRIDE} bytes, found {self.row_stride}"
            )

    @property
    def pointers(self) -> tuple[tuple[int, int], ...]:
        """The input context_pointers [L, 2]: each layer's address, and the checksum of it and the layout."""
        return tuple((address, ~(address + sum(self.layout))) for address in self.addresses)

    @property
    def layout(self) -> tuple[int, ...]:
        """The input context_layout: page size, strides and number of pages."""
        return self[1:]
