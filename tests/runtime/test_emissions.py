# SPDX-License-Identifier: Apache-2.0
"""Emissions of an answer, read at once and in parts, as a stream reads them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.api.acceptance import Step
from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime.emissions import Emissions

IDS = st.lists(st.integers(0, 10**6), max_size=4)
PASSES = st.lists(st.tuples(IDS, IDS.filter(bool), st.booleans(), st.integers(0, 4)), max_size=6)


@given(PASSES, st.integers(1, 3))
def test_what_was_added_is_read(passes: list[tuple[list[int], list[int], bool, int]], read_every: int) -> None:
    emissions, answer, place, begin = Emissions(), [7], 0, 0
    emissions.add(0.5, Proposals([]), 1, 0)
    expected, steps, times = list[Step](), list[Step](), list[float]()
    for number, (drafts, token_ids, is_forced, accepted) in enumerate(passes, 1):
        emissions.add(number + 0.5, Proposals(drafts, is_forced=is_forced), len(token_ids), accepted)
        answer += token_ids
        step = Step(token_ids=tuple(token_ids), proposals=tuple(drafts), accepted=accepted, is_forced=is_forced)
        expected.append(step)
        if number % read_every == 0:
            new = emissions.read(answer, place, begin)
            steps, times, place, begin = [*steps, *new.steps], [*times, *new.times], new.end, len(answer)
    rest, whole = emissions.read(answer, place, begin), emissions.read(answer)
    assert whole.steps == [*steps, *rest.steps] == expected
    assert whole.times == [*times, *rest.times] == [number + 0.5 for number in range(len(passes) + 1)]
    assert whole.end == rest.end
