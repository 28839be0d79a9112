# SPDX-License-Identifier: Apache-2.0
"""Slots and context of a drafter, against the two graphs called one by one with a cache kept in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.kvcache.page_table import FIRST_PAGES
from tests.engines import Graphs, build

NUM_SLOTS = 3
FIRST_ROWS = FIRST_PAGES * TOKENS_PER_PAGE
"""Rows that a new cache has room for."""


class Expected:
    """Rows and lengths by the book: one call of context.onnx for each slot, one of draft.onnx for each block."""

    def __init__(self, engine: Path) -> None:
        self._graphs = Graphs(engine)
        spec = self._graphs.spec
        shape = (NUM_SLOTS, len(spec.layers), 5 * FIRST_ROWS, spec.num_key_value_heads, spec.head_dim)
        self._caches = (np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32))
        self.lengths = [0] * NUM_SLOTS

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor) -> None:
        begin = 0
        for slot, count in zip(slots, num_rows, strict=True):
            rows = slice(self.lengths[slot], self.lengths[slot] + count)
            kv = self._graphs.context(taps[begin : begin + count].numpy(), np.arange(rows.start, rows.stop))
            for cache, new in zip(self._caches, kv, strict=True):
                cache[slot, :, rows] = new.transpose(1, 0, 2, 3)
            self.lengths[slot] += count
            begin += count

    def draft(self, slots: Sequence[int], blocks: torch.Tensor) -> torch.Tensor:
        hidden = [
            self._graphs.draft(block[None].numpy(), self._caches, [slot], [self.lengths[slot]])
            for slot, block in zip(slots, blocks, strict=True)
        ]
        return torch.from_numpy(np.concatenate(hidden))


@pytest.fixture
def engine(draft_dir: Path, tmp_path: Path) -> Path:
    build(draft_dir, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def drafter(engine: Path) -> Drafter:
    return open_drafter(engine, read_manifest(engine), num_slots=NUM_SLOTS)


def step(
    drafter: Drafter, expected: Expected, context: dict[int, int], slots: Sequence[int], random: torch.Generator
) -> None:
    """Injects `context` rows by slot and drafts for `slots`, with both."""
    taps = torch.randn(sum(context.values()), drafter.spec.target_hidden_size, generator=random)
    blocks = torch.randn(len(slots), drafter.spec.block_size, drafter.spec.hidden_size, generator=random)
    for either in (drafter, expected):
        either.inject(list(context), list(context.values()), taps)
    assert drafter.cache.lengths == expected.lengths
    torch.testing.assert_close(drafter.draft(slots, blocks), expected.draft(slots, blocks), rtol=1e-4, atol=1e-4)


def test_slots_grow_at_their_own_pace(engine: Path, drafter: Drafter) -> None:
    expected, random = Expected(engine), torch.Generator().manual_seed(0)
    step(drafter, expected, {0: 5, 2: 31}, [0, 2], random)
    step(drafter, expected, {1: 1}, [1], random)
    step(drafter, expected, {2: 1, 0: 4, 1: 3}, [2, 0, 1], random)
    step(drafter, expected, {0: 2}, [1, 2], random)  # a slot without new rows keeps its own
    drafter.release(2)
    expected.lengths[2] = 0
    step(drafter, expected, {2: 7}, [0, 2, 1], random)
    step(drafter, expected, {1: 0}, [1, 1], random)
    step(drafter, expected, {}, [0], random)


def test_the_cache_grows_with_what_it_holds(engine: Path, drafter: Drafter) -> None:
    """Twice, once by half and once to more; the executor reads the new one, and pages that lie anywhere."""
    expected, random = Expected(engine), torch.Generator().manual_seed(1)
    drafter.reserve(0, list(range(200, 240)), 0)
    step(drafter, expected, {1: FIRST_ROWS}, [1], random)
    assert len(drafter.cache.k) == FIRST_PAGES
    step(drafter, expected, {1: 1}, [1], random)
    assert len(drafter.cache.k) == FIRST_PAGES + FIRST_PAGES // 2
    step(drafter, expected, {0: FIRST_ROWS + 9, 1: 1}, [0, 1], random)
    assert len(drafter.cache.k) == 200 + FIRST_PAGES + 1


def test_pages_in_any_order_are_one_context(engine: Path, drafter: Drafter) -> None:
    """Blocks of one batch read 1, 3 and no pages."""
    expected, random = Expected(engine), torch.Generator().manual_seed(2)
    drafter.reserve(0, [7, 2, 5], 0)
    drafter.reserve(2, [3, 0], 0)
    step(drafter, expected, {0: 2 * TOKENS_PER_PAGE - 1}, [0, 1], random)
    step(drafter, expected, {0: 2, 2: TOKENS_PER_PAGE}, [2, 0, 1], random)
    step(drafter, expected, {2: 1}, [0, 2], random)


def test_a_page_of_another_is_zeros_again(drafter: Drafter) -> None:
    """A masked row takes part as 0 * value: what a request left behind may be NaN."""
    width, blocks = drafter.spec.target_hidden_size, torch.ones(2, drafter.spec.block_size, drafter.spec.hidden_size)
    drafter.reserve(0, [0, 1], 0)
    drafter.inject([0], [2 * TOKENS_PER_PAGE], torch.full((2 * TOKENS_PER_PAGE, width), torch.nan))
    drafter.release(0)
    drafter.reserve(1, [1], 0)
    drafter.inject([1], [3], torch.ones(3, width))
    drafter.reserve(2, [5, 3], 0)
    drafter.inject([2], [TOKENS_PER_PAGE + 1], torch.ones(TOKENS_PER_PAGE + 1, width))
    assert drafter.draft([1, 2], blocks).isfinite().all()


def test_a_cache_that_grew_while_decoding_is_cleared_by_anybody(drafter: Drafter) -> None:
    """The loop injects in torch's inference mode, and whoever begins a request reserves its pages outside."""
    num_rows = FIRST_ROWS + 1
    with torch.inference_mode():
        drafter.inject([0], [num_rows], torch.randn(num_rows, drafter.spec.target_hidden_size))
    drafter.release(0)
    drafter.reserve(1, list(range(FIRST_PAGES + 1)), 0)
    assert drafter.cache.lengths[0] == 0
    assert not drafter.cache.k.any()


def test_what_a_row_takes(drafter: Drafter) -> None:
    cache = drafter.cache
    assert cache.k.nbytes + cache.v.nbytes == FIRST_ROWS * drafter.cache_bytes_per_token


def test_hidden_states_have_the_dtype_of_the_blocks(drafter: Drafter) -> None:
    blocks = torch.zeros(1, drafter.spec.block_size, drafter.spec.hidden_size, dtype=torch.bfloat16)
    assert drafter.draft([0], blocks).dtype == torch.bfloat16


def test_context_of_a_slot(drafter: Drafter) -> None:
    spec = drafter.spec
    taps = torch.randn(5, spec.target_hidden_size)
    drafter.inject([1, 0], [3, 2], taps)
    k, v = drafter.executor.context(taps[:3], torch.arange(3))
    found = drafter.cache.rows(1)
    assert torch.equal(found[0], k.transpose(0, 1))
    assert torch.equal(found[1], v.transpose(0, 1))
    drafter.release(1)
    assert drafter.cache.rows(1)[0].shape == (len(spec.layers), 0, spec.num_key_value_heads, spec.head_dim)


def test_hidden_states_outlive_the_next_pass(drafter: Drafter) -> None:
    first, second = torch.randn(2, 1, drafter.spec.block_size, drafter.spec.hidden_size)
    hidden = drafter.draft([0], first)
    kept = hidden.clone()
    drafter.draft([0], second)
    assert torch.equal(hidden, kept)
