# SPDX-License-Identifier: Apache-2.0
"""Memory of a cache in pages, which grows with the pages that are written."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Collection, Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

FIRST_PAGES = 16
"""Pages that a new cache has room for."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in an anonymous mapping, which takes memory on first write and returns it when it is freed.

    torch.zeros would write all of it, and so does calloc in freed memory. MemoryError where there is no room.
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
    """A copy with room for `num_pages` pages, and at least 1.5 times as many as before; copies `written` pages only."""
    shape = list(cache.shape)
    shape[dim] = max(num_pages, shape[dim] + shape[dim] // 2)
    new = zeros(shape, cache.dtype, cache.device)
    for begin, end in _runs(sorted(page for page in written if page < cache.shape[dim])):
        new.narrow(dim, begin, end - begin).copy_(cache.narrow(dim, begin, end - begin))
    return new


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of consecutive pages; `pages` in order."""
    begin = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[begin], pages[i - 1] + 1
            begin = i
