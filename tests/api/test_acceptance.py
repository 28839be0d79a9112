# SPDX-License-Identifier: Apache-2.0
"""Tau in its two variants, and acceptance by position from 1, by values that can be checked by hand."""

import pytest

from dflash_trt.api.acceptance import Acceptance, Step
from dflash_trt.runtime.measure.statistics import acceptance_by_position

STEPS = [
    Step(token_ids=(6, 7, 8), proposals=(0,) * 3, accepted=2),
    Step(token_ids=(9,), proposals=(0,) * 3, accepted=0),
    Step(token_ids=(5,), proposals=(), accepted=0),
    Step(token_ids=(4,), proposals=(), accepted=0),
]


def test_passes_without_drafts_count_in_one_tau_and_not_in_the_other() -> None:
    found = Acceptance.of(STEPS)
    assert found == Acceptance(
        passes=4, drafting_passes=2, emitted=6, proposed=6, accepted=2, accepted_by_position=(1, 1, 0)
    )
    assert (found.tau, found.tau_of_drafting_passes) == (6 / 4, 4 / 2)


def test_plain_decoding_has_tau_1_and_none_of_drafting_passes() -> None:
    found = Acceptance.of(STEPS[2:])
    assert (found.tau, found.tau_of_drafting_passes) == (1, None)
    assert (Acceptance().tau, Acceptance().tau_of_drafting_passes) == (None, None)


def test_a_sum_is_that_of_all_steps() -> None:
    """Positions that one of both never proposed count for nothing."""
    short = Step(token_ids=(1, 2), proposals=(0,), accepted=1)
    assert Acceptance.of(STEPS) + Acceptance.of([short]) == Acceptance.of([*STEPS, short])
    assert Acceptance.of([short]).accepted_by_position == (1,)


def test_forced_tokens_are_counted_apart() -> None:
    """A pass that a stop text cut has no token of the target's own; it counts all the same."""
    whole = Step(token_ids=(1, 2, 3), proposals=(1, 2), accepted=2, is_forced=True)
    cut = Step(token_ids=(1, 2), proposals=(1, 2, 3), accepted=2, is_forced=True)
    found, without = Acceptance.of([*STEPS, whole, cut]), Acceptance.of(STEPS)
    assert found == Acceptance(forced_passes=2, forced=4) + without
    assert (found.tau, found.all_passes) == (without.tau, 6)
    assert Acceptance.of([whole]).tau is None


def test_what_one_does_not_publish_is_unknown_of_both() -> None:
    outside = Acceptance(passes=None, emitted=None, proposed=None, drafting_passes=4, accepted=8)
    both = Acceptance.of(STEPS) + outside
    assert (both.passes, both.emitted, both.proposed, both.tau) == (None, None, None, None)
    assert (both.drafting_passes, both.accepted, both.tau_of_drafting_passes) == (6, 10, 16 / 6)


def counts(steps: list[Step], num_draft_tokens: int = 3) -> list[tuple[int, int]]:
    return [(entry.proposed, entry.accepted) for entry in acceptance_by_position(steps, num_draft_tokens)]


def test_acceptance_by_position() -> None:
    steps = [
        Step(token_ids=[6, 7, 8], proposals=[0] * 3, accepted=2),
        Step(token_ids=[9], proposals=[0] * 3, accepted=0),
        Step(token_ids=[1, 2], proposals=[0] * 1, accepted=1),  # near the limit only one is proposed
        Step(token_ids=[5], proposals=[0] * 0, accepted=0),  # finally none
    ]
    assert counts(steps) == [(3, 2), (2, 1), (2, 0)]
    assert [entry.share for entry in acceptance_by_position(steps, 3)] == [pytest.approx(2 / 3), 0.5, 0.0]


def test_nothing_is_judged_behind_a_stop_token() -> None:
    """The stop token was the second proposal: it is unknown whether the third was right."""
    assert counts([Step(token_ids=[6, 0], proposals=[0] * 3, accepted=2)]) == [(1, 1), (1, 1), (0, 0)]
    # The stop token was the bonus: the second proposal was judged, and refused.
    assert counts([Step(token_ids=[6, 0], proposals=[0] * 3, accepted=1)]) == [(1, 1), (1, 0), (1, 0)]
    assert acceptance_by_position([], 1)[0].share is None
