# SPDX-License-Identifier: Apache-2.0
"""Tensors of pages, which take memory page by page as they are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

FIRST_PAGES = 16
"""That a cache has room for before it grows."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU by calloc, whose pages take memory when they are written (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)


def grown(cache: Tensor, dim: int, num_pages: int, written: Collection[int]) -> Tensor:
    """A copy with room for `num_pages` pages and half as many as before at least; dimension `dim` are pages.

    Only the pages `written` are copied, so that the others go on taking no memory.
    """
    shape = list(cache.shape)
    shape[dim] = max(num_pages, shape[dim] + shape[dim] // 2)
    new = zeros(shape, cache.dtype, cache.device)
    pages = torch.tensor([page for page in written if page < cache.shape[dim]], dtype=torch.int64, device=cache.device)
    new.index_copy_(dim, pages, cache.index_select(dim, pages))
    return new
