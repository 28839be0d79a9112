# SPDX-License-Identifier: Apache-2.0
"""Greedy or drawn proposals: the way that accepts more is taken, and the other is tried again and again."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.policy.proposal_choice import ProposalChoice
from dflash_trt.runtime.policy.step_record import BlockRecord, StepRecord


def step(*blocks: BlockRecord) -> StepRecord:
    return StepRecord(blocks=blocks, num_prompt_tokens=0, seconds=0.01)


def block(accepted: int, *, drawn: bool | None, temperature: float = 1.0, proposed: int = 9) -> BlockRecord:
    return BlockRecord(proposed=proposed, accepted=accepted, temperature=temperature, drawn=drawn)


@pytest.mark.parametrize(("greedy", "drawn"), [(3, 1), (1, 3)])
def test_the_way_that_accepts_more_is_taken(greedy: int, drawn: int) -> None:
    """At each temperature for itself; a block without a choice, or without drafts, counts for nothing."""
    choice, ways = ProposalChoice(), list[bool]()
    for _ in range(1000):
        ways.append(is_drawn := choice.is_drawn(1.0))
        uncounted = block(9, drawn=None), block(0, drawn=not is_drawn, proposed=0)
        choice.observe(step(block(drawn if is_drawn else greedy, drawn=is_drawn), *uncounted))
    assert sum(ways[:64]) == 32, "each in turn at first"
    assert sum(way is (drawn < greedy) for way in ways[64:]) == 24, "the other way in blocks 64, 81, ..., 961"
    assert not choice.is_drawn(0.5), "nothing is known of this temperature"
