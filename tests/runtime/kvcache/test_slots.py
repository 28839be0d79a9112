# SPDX-License-Identifier: Apache-2.0
"""Slots, their pages and tensors, under any sequence of queries, allocations and releases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.kvcache.page_memory import grown, zeros
from dflash_trt.runtime.kvcache.page_table import PageTable
from dflash_trt.runtime.kvcache.prefix_index import ROOT
from dflash_trt.runtime.kvcache.slots import SlotPool

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


SLOTS = st.integers(1, 6)
PAGES = st.integers(0, 12)
TOKENS = st.integers(0, 12 * TOKENS_PER_PAGE)


class SlotPoolMachine(RuleBasedStateMachine):
    """Compares the pool with a dict of who holds what."""

    @initialize(num_slots=SLOTS, num_pages=PAGES, rest=st.integers(0, TOKENS_PER_PAGE - 1))
    def create(self, num_slots: int, num_pages: int, rest: int) -> None:
        self.pool = SlotPool(num_slots, num_pages * TOKENS_PER_PAGE + rest)
        self.num_slots, self.num_pages = num_slots, num_pages
        self.held: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return self.num_pages - sum(map(len, self.held.values()))

    def _fits(self, num_tokens: int) -> bool:
        return len(self.held) < self.num_slots and num_tokens <= self.num_free * TOKENS_PER_PAGE

    @rule(num_tokens=TOKENS)
    def has_room(self, num_tokens: int) -> None:
        assert self.pool.has_room(num_tokens) is self._fits(num_tokens)

    @rule(num_tokens=TOKENS)
    def allocate(self, num_tokens: int) -> None:
        if not self._fits(num_tokens):
            return
        free = set(range(self.num_pages)).difference(*self.held.values())
        slot, pages, num_cached = self.pool.allocate(num_tokens)
        assert num_cached == 0
        assert slot == min(set(range(self.num_slots)) - self.held.keys())
        assert 0 <= len(pages) * TOKENS_PER_PAGE - num_tokens < TOKENS_PER_PAGE
        assert len(set(pages)) == len(pages)
        assert free >= set(pages)
        assert pages == sorted(free)[: len(pages)], "the lowest, so that the caches grow late"
        self.held[slot] = pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        del self.held[slot]

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free_slots == self.num_slots - len(self.held)
        assert self.pool.num_tokens == self.num_pages * TOKENS_PER_PAGE
        assert self.pool.free_tokens == self.num_free * TOKENS_PER_PAGE


SlotPoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestSlotPool = SlotPoolMachine.TestCase


class SharedPagesMachine(RuleBasedStateMachine):
    """Compares what prompts share with a dict of what each page holds, and with what a watcher was told."""

    @initialize(num_slots=SLOTS, num_pages=PAGES)
    def create(self, num_slots: int, num_pages: int) -> None:
        self.pool = SlotPool(num_slots, num_pages * P, prefix_caching=True)
        self.pool.index.watcher = self
        self.num_slots, self.num_pages = num_slots, num_pages
        self.running: dict[int, tuple[list[int], list[int]]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.contents: dict[int, list[int]] = {}
        """Tokens up to the end of each page that was filled."""
        self.known: dict[int, list[int]] = {ROOT: []}

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Notes an entry of the index; one whose predecessor is gone can never be found."""
        if before in self.known:
            self.known[number] = [*self.known[before], *token_ids]

    def removed(self, number: int) -> None:
        """Forgets an entry and all that can be found only through it."""
        if (gone := self.known.get(number)) is not None:
            self.known = {n: ids for n, ids in self.known.items() if ids[: len(gone)] != gone}

    def held(self) -> set[int]:
        return {page for pages, _ in self.running.values() for page in pages}

    @rule(pages=st.lists(st.integers(0, 1), max_size=4), rest=st.integers(1, P), answer=st.integers(0, 2 * P))
    def allocate(self, pages: list[int], rest: int, answer: int) -> None:
        prompt = [token for page in pages for token in [page] * P] + [2] * rest
        num_tokens = len(prompt) + answer
        cached = max(len(ids) for ids in self.known.values() if ids == prompt[: len(ids)] and len(ids) < len(prompt))
        has_room = len(self.running) < self.num_slots and num_tokens <= self.pool.free_tokens
        end = cached + P
        ahead = [slot for slot, other in self.prompts.items() if other[:end] == prompt[:end]]
        waits = end < len(prompt) and ahead and all(len(self.running[slot][1]) < end for slot in ahead)
        assert self.pool.has_room(num_tokens) is has_room
        assert self.pool.is_computing(prompt) is bool(waits)
        if not has_room:
            return
        slot, taken, num_cached = self.pool.allocate(num_tokens, prompt)
        assert num_cached == cached
        for i in range(num_cached // P):
            assert self.contents[taken[i]] == prompt[: (i + 1) * P], "a page of other tokens is shared"
        own = taken[num_cached // P :]
        assert not {*own} & self.held()
        for page in own:
            self.contents.pop(page, None)
        self.running[slot], self.prompts[slot] = (taken, prompt[:num_cached]), prompt

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 2 * P), token=st.integers(0, 1))
    def append(self, data: st.DataObject, count: int, token: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        pages, tokens = self.running[slot]
        following = [*self.prompts[slot][len(tokens) :], *[token] * count][: min(count, len(pages) * P - len(tokens))]
        for number in range(len(tokens) // P, (len(tokens) + len(following)) // P):
            self.contents[pages[number]] = [*tokens, *following][: (number + 1) * P]
        tokens += following
        self.pool.append(slot, following)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[slot], self.prompts[slot]
        self.pool.free(slot)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free_slots == self.num_slots - len(self.running)
        assert self.pool.free_tokens == (self.num_pages - len(self.held())) * P


SharedPagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSharedPages = SharedPagesMachine.TestCase


def test_a_prompt_waits_for_a_page_that_is_being_computed() -> None:
    """A page that differs is not waited for, nor one whose request has left."""
    pool, prompt = SlotPool(4, 40 * P, prefix_caching=True), [*range(3 * P)]
    first = pool.allocate(4 * P, prompt).slot
    assert pool.is_computing(prompt)
    assert not pool.is_computing([7, *prompt])
    pool.append(first, prompt[: P + 1])
    assert pool.is_computing(prompt), "its second page is being computed"
    assert not pool.is_computing(prompt[: 2 * P]), "its last page is its own"
    pool.free(first)
    assert not pool.is_computing(prompt)
    assert pool.allocate(4 * P, prompt).num_cached_tokens == P


def test_a_watcher_hears_of_shared_pages() -> None:
    """Each page is reported once, after its parent; then the ones that were evicted for room."""
    heard: list[tuple[object, ...]] = []

    class Watcher:
        def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
            heard.append(("stored", number, before, list(token_ids)))

        def removed(self, number: int) -> None:
            heard.append(("removed", number))

    pages = [[page] * TOKENS_PER_PAGE for page in range(3)]
    slots = SlotPool(2, 4 * TOKENS_PER_PAGE, prefix_caching=True)
    slots.index.watcher = Watcher()
    for _ in range(2):
        slot = slots.allocate(2 * TOKENS_PER_PAGE).slot
        slots.append(slot, pages[0] + pages[1])
        slots.free(slot)
    assert heard == [("stored", 1, ROOT, pages[0]), ("stored", 2, 1, pages[1])]
    slots.allocate(4 * TOKENS_PER_PAGE)
    assert heard[2:] == [("removed", 2), ("removed", 1)]
