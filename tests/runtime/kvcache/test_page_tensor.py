# SPDX-License-Identifier: Apache-2.0
"""Memory that caches take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dflash_trt.runtime.kvcache.page_table import zeros

PAGE = 4096


def resident(begin: int, end: int) -> float:
    """Share of the pages between two addresses that take memory."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(begin // PAGE * 8)
        entries = np.frombuffer(file.read((end - begin) // PAGE * 8), np.uint64)
    return float((entries >> 63).mean())


def test_a_cache_takes_memory_as_it_is_written_and_gives_it_back() -> None:
    """On the heap, unwritten pages would be filled with zeros, and an outgrown cache would leave a hole."""
    num_bytes = 24 * 2**20
    cache = zeros((num_bytes,), torch.uint8, torch.device("cpu"))
    begin, middle = cache.data_ptr(), cache.data_ptr() + num_bytes // 2
    assert resident(begin, middle + num_bytes // 2) == 0
    cache[: num_bytes // 2] = 1
    assert resident(begin, middle) == 1
    assert resident(middle, middle + num_bytes // 2) < 0.25, "a huge page at most"
    del cache
    assert resident(begin, middle) == 0
