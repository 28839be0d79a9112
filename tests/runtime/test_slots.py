# SPDX-License-Identifier: Apache-2.0
"""The slot pool under any sequence of asking, taking and giving back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_trt.runtime.slots import SlotPool

SLOTS = st.integers(1, 6)
TOKENS = st.integers(0, 40)


class SlotPoolMachine(RuleBasedStateMachine):
    """Compares the pool with a dict of who holds what."""

    @initialize(num_slots=SLOTS, num_tokens=TOKENS)
    def create(self, num_slots: int, num_tokens: int) -> None:
        self.pool = SlotPool(num_slots, num_tokens)
        self.num_slots, self.num_tokens = num_slots, num_tokens
        self.held: dict[int, int] = {}

    def _fits(self, num_tokens: int) -> bool:
        return len(self.held) < self.num_slots and num_tokens + sum(self.held.values()) <= self.num_tokens

    @rule(num_tokens=TOKENS)
    def fits(self, num_tokens: int) -> None:
        assert self.pool.fits(num_tokens) is self._fits(num_tokens)

    @rule(num_tokens=TOKENS)
    def allocate(self, num_tokens: int) -> None:
        if not self._fits(num_tokens):
            with pytest.raises(ValueError, match=f"expected a free slot with room for {num_tokens} tokens, found"):
                self.pool.allocate(num_tokens)
            return
        slot = self.pool.allocate(num_tokens)
        assert slot == min(set(range(self.num_slots)) - self.held.keys())
        self.held[slot] = num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        del self.held[slot]

    @rule(slot=st.integers(-1, 7))
    def free_a_free_slot(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(ValueError, match=f"slot {slot}: expected an allocated slot, found it free"):
                self.pool.free(slot)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free_slots == self.num_slots - len(self.held)
        assert self.pool.free_tokens == self.num_tokens - sum(self.held.values())


SlotPoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSlotPool = SlotPoolMachine.TestCase


def test_the_refusal_names_what_is_free() -> None:
    pool = SlotPool(2, 10)
    pool.allocate(7)
    with pytest.raises(ValueError, match="room for 4 tokens, found 1 slots and 3 tokens free"):
        pool.allocate(4)
    assert pool.allocate(3) == 1
    with pytest.raises(ValueError, match="room for 0 tokens, found 0 slots and 0 tokens free"):
        pool.allocate(0)
