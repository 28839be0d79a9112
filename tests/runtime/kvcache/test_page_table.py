# SPDX-License-Identifier: Apache-2.0
"""Where a slot's tokens lie, and what must be cleared before."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.kvcache.page_table import PageTable, grown, zeros

P = TOKENS_PER_PAGE


def append(table: PageTable, slot: int, num_tokens: int) -> list[int]:
    """Lengthens a slot; pages that had to be cleared."""
    stale = table.cover(slot, num_tokens)
    table.lengths[slot] += num_tokens
    return stale


def test_rows_are_those_of_the_slots_pages() -> None:
    table = PageTable(2)
    table.reserve(0, [4, 5], 0)
    table.reserve(1, [3, 7, 1], 0)
    append(table, 0, P - 1)
    append(table, 1, 2 * P - 1)
    assert list(table.rows(0, 2)) == [5 * P - 1, 5 * P]
    assert list(table.rows(1, 2)) == [8 * P - 1, P]


def test_reserved_pages_that_were_never_written_are_counted_nowhere() -> None:
    """A long request takes memory as it grows."""
    table = PageTable(2)
    table.reserve(0, list(range(1000)), 0)
    table.reserve(1, [1000], 0)
    append(table, 0, 3 * P)
    assert table.num_pages == 3
    append(table, 1, 1)
    assert table.written == {0, 1, 2, 1000}
    assert table.num_pages == 1001


def test_what_others_have_written_is_cleared_and_what_is_shared_is_not() -> None:
    table = PageTable(2)
    table.reserve(0, [0, 1, 2], 0)
    append(table, 0, 2 * P + 1)
    table.release(0)
    assert table.reserve(1, [0, 2, 8], P) == [2]
    assert table.lengths[1] == P
    assert table.written == {0, 1}
    assert append(table, 1, 1) == []
    table.release(1)
    assert table.reserve(0, [8, 2], 0) == [2]


def test_a_slot_that_reserved_nothing_takes_pages_that_nobody_holds() -> None:
    table = PageTable(3)
    table.reserve(1, [0, 2], 0)
    append(table, 0, 2 * P)
    append(table, 2, 1)
    assert table.pages == [[1, 3], [0, 2], [4]]
    table.release(0)
    assert append(table, 2, 2 * P) == [1, 3]


def test_a_slot_does_not_outgrow_what_it_reserved() -> None:
    table = PageTable(1)
    table.reserve(0, [0], 0)
    with pytest.raises(AssertionError, match="slot 0 outgrows its reservation"):
        table.cover(0, P + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_grows_keeps_what_was_written(dtype: torch.dtype) -> None:
    cache = zeros((2, 4, 3), dtype, torch.device("cpu"))
    cache[:, 1:3] = 7
    larger = grown(cache, 1, 5, {2, 4})
    assert larger.dtype == dtype
    assert larger.shape == (2, 6, 3)
    assert (larger[:, 2] == 7).all()
    assert larger.sum() == 7 * 6, "page 1 holds nothing that counts"
    assert grown(cache, 1, 40, {2}).shape == (2, 40, 3)
