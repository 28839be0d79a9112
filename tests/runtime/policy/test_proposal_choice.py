# SPDX-License-Identifier: Apache-2.0
"""Greedy or drawn proposals: the way that accepts more is taken, and the other is tried again and again."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.policy.proposal_choice import ProposalChoice
from dflash_trt.runtime.policy.step_record import FreeBlock, StepRecord


def step(*free: FreeBlock) -> StepRecord:
    """A step with a block more, whose drafts had to be greedy."""
    return StepRecord(
        proposed=[9] * (len(free) + 1), accepted=[9] * (len(free) + 1), free=free, num_prompt_tokens=0, seconds=0.01
    )


@pytest.mark.parametrize(("greedy", "drawn"), [(3, 1), (1, 3)])
def test_the_way_that_accepts_more_is_taken(greedy: int, drawn: int) -> None:
    """At each temperature for itself; a block without a choice counts for nothing."""
    choice, ways = ProposalChoice(), list[bool]()
    for _ in range(1000):
        ways.append(is_drawn := choice.is_drawn(1.0))
        choice.observe(step(FreeBlock(1.0, is_drawn, drawn if is_drawn else greedy)))
    assert sum(ways[:64]) == 32, "each in turn at first"
    assert sum(way is (drawn < greedy) for way in ways[64:]) == 24, "the other way in blocks 64, 81, ..., 961"
    assert not choice.is_drawn(0.5), "nothing is known of this temperature"
