# SPDX-License-Identifier: Apache-2.0
"""Where a context cache lies in memory: the inputs context_pointers and context_layout (docs/kv_injection.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES
from dflash_trt.errors import EngineError

ALIGNMENT = 16


class ContextLayout(NamedTuple):
    """Addresses and strides of a context cache."""

    pointers: tuple[int, ...]
    """[L]: addresses of the first page's K."""
    page_size: int
    page_stride: int
    """From a page to the next of one layer; all strides are in bytes."""
    kv_stride: int
    row_stride: int
    head_stride: int

    @classmethod
    def of_caches(cls, k_cache: Tensor, v_cache: Tensor) -> ContextLayout:
        """Layout of K and V [pages, L, rows, G, D]; a dense cache has one page a slot."""
        page, layer, row, head, _ = (stride * k_cache.itemsize for stride in k_cache.stride())
        first, L = k_cache.data_ptr(), k_cache.shape[1]
        pointers = tuple(range(first, first + L * layer, layer))
        return cls(pointers, k_cache.shape[2], page, v_cache.data_ptr() - first, row, head)

    @classmethod
    def of_layers(cls, layers: Sequence[Tensor]) -> ContextLayout:
        """Layout of views [pages, 2, G, rows, D], one a layer, with equal strides."""
        page, kv, head, row, _ = (stride * layers[0].itemsize for stride in layers[0].stride())
        return cls(tuple(layer.data_ptr() for layer in layers), layers[0].shape[3], page, kv, row, head)

    def check(self, num_pages: int) -> None:
        """Raises EngineError for a layout that the plugin rejects with a page table of `num_pages` columns.

        The plugin itself could only answer NaN: layouts are on the GPU.
        """
        sizes = PAGE_SIZES if num_pages > 1 else range(1, MAX_CONTEXT + 1)
        if self.page_size not in sizes:
            expected = "16, 32 or 64" if num_pages > 1 else f"at most {MAX_CONTEXT}"
            raise EngineError(f"context cache: expected pages of {expected} rows, found {self.page_size}")
        if odd := [value for value in (*self.pointers, *self.layout[1:]) if value % ALIGNMENT]:
            raise EngineError(f"context cache: expected addresses and strides that {ALIGNMENT} divides, found {odd[0]}")

    @property
    def layout(self) -> tuple[int, ...]:
        """The input context_layout: page size and strides."""
        return self[1:]
