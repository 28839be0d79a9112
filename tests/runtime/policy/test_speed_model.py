# SPDX-License-Identifier: Apache-2.0
"""Blocks that end before the first draft that is not worth its cost."""

from __future__ import annotations

from dflash_trt.runtime.policy.speed_model import SurvivalCut

SURVIVAL = [0.9, 0.5, 0.3, 0.2]


def cutting(tokens_per_cost: list[float]) -> SurvivalCut:
    """A cut that knows what each length must bring, of a draft that knows what survives, in a step that may be cut."""
    cut = SurvivalCut()
    cut.plan(tokens_per_cost)
    assert cut.length(SURVIVAL) == len(SURVIVAL), "no step is cut before a draft has told what survives"
    cut.begin_step(may_cut=True)
    return cut


def test_a_block_ends_before_the_first_draft_that_costs_more_than_it_brings() -> None:
    assert cutting([1.0, 1.4, 1.8, 2.2, 2.6]).length(SURVIVAL) == 2
    assert cutting([1.0, 1.1, 1.2, 1.8, 1.9]).length(SURVIVAL) == 2, "what follows is not looked at"
    assert cutting([1.0, 1.1, 1.2, 1.3, 1.4]).length(SURVIVAL) == 4


def test_the_drafters_own_cost_is_spent_when_a_block_is_cut() -> None:
    """It is part of the first length's cost."""
    assert cutting([1.0, 3.0, 3.4, 3.8, 4.2]).length(SURVIVAL) == 2
    assert cutting([1.0, 1.1, 2.0, 2.9, 3.8]).length([0.8, 0.8]) == 0


def test_steps_that_are_measured_are_whole() -> None:
    cut = cutting([1.0, 1.4, 1.8, 2.2, 2.6])
    assert cut.is_cutting
    assert cut.begin_step(may_cut=False), "the first measured step after cut ones"
    assert not cut.begin_step(may_cut=False)
    assert cut.length(SURVIVAL) == 4
    cut.plan(())
    cut.begin_step(may_cut=True)
    assert cut.length(SURVIVAL) == 4, "nothing is cut without a plan"
