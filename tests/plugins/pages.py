# SPDX-License-Identifier: Apache-2.0
"""Where a call finds its context: a dense cache, or pages of a pool in TensorRT-LLM's two layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

UNALLOCATED = 2**31 - 1
"""An entry of the page table that nobody may follow."""


@dataclass(frozen=True)
class Pages:
    """A pool of pages [P, L, 2, G, size, D], in a random order, between pages of NaN.

    Layer l's view begins with its part of the first page. With V1 its pages are whole pages apart and entries count
    pages; with V2 they are parts apart, and entries count parts.
    """

    size: int
    version: str = "V2"
    first: int = 0
    """Pages of the pool before those that are used."""


class Context(NamedTuple):
    """The node's inputs, and the memory that they lead to."""

    pool: torch.Tensor
    offsets: list[int]
    """[L], of the pool."""
    layout: list[int]
    """Page size; strides of page, K to V, row and head in bytes."""
    table: torch.Tensor  # [slots, M] INT32


def paged(k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: dict[int, int], pages: Pages, seed: int) -> Context:
    """The first `lengths[slot]` rows of both caches [slots, L, C_max, G, D] in pages; nothing else is in them.

    Equal pages are one page, as those of a prefix that requests share.
    """
    slots, L, C_max, G, D = k_cache.shape
    size, itemsize, device = pages.size, k_cache.element_size(), k_cache.device
    M = -(-C_max // size)
    used = {slot: -(-length // size) for slot, length in lengths.items()}
    num_pages = pages.first + sum(used.values()) + 2
    raw = torch.full((num_pages - pages.first, L, 2, G, size, D * itemsize), 0xFF, dtype=torch.uint8, device=device)
    order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(seed)).tolist()
    written: dict[bytes, int] = {}
    table = torch.full((slots, M), UNALLOCATED, dtype=torch.int32)
    for slot, count in used.items():
        for column in range(count):
            begin = column * size
            rows = min(size, lengths[slot] - begin)
            content = torch.full_like(raw[0], 0xFF)
            for kv, cache in enumerate((k_cache, v_cache)):
                part = cache[slot, :, begin : begin + rows].transpose(1, 2).contiguous().view(torch.uint8)
                content[:, kv, :, :rows] = part.view(L, G, rows, D * itemsize)
            key = content.cpu().numpy().tobytes()
            page = written.setdefault(key, order[-1])
            if page == order[-1]:
                raw[order.pop()] = content
            table[slot, column] = (page + pages.first) * (L if pages.version == "V2" else 1)
    part_bytes = 2 * G * size * D * itemsize
    row = D * itemsize
    page_stride = part_bytes * (L if pages.version == "V1" else 1)
    layout = [size, page_stride, part_bytes // 2, row, size * row]
    return Context(
        raw, [layer * part_bytes - pages.first * L * part_bytes for layer in range(L)], layout, table.to(device)
    )


def dense(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Context:
    """Both caches [slots, L, C_max, G, D] where they lie: a page a slot. The pool is K."""
    slots, L, C_max, G, D = k_cache.shape
    row = D * k_cache.element_size()
    plane = C_max * G * row
    layout = [C_max, L * plane, v_cache.data_ptr() - k_cache.data_ptr(), G * row, row]
    table = torch.arange(slots, dtype=torch.int32, device=k_cache.device)[:, None]
    return Context(k_cache, [layer * plane for layer in range(L)], layout, table)
