# SPDX-License-Identifier: Apache-2.0
"""Emissions of an answer: numbers in one list, which become `Step` objects when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_trt.api.acceptance import Step
from dflash_trt.engine.proposals import Proposals


class Emitted(NamedTuple):
    """A part of the emissions."""

    times: list[float]
    steps: list[Step]
    """Verify passes, without the prefill, which emits the first token."""
    end: int
    """Place of what comes next."""


class Emissions:
    """Emissions of a request, the prefill's first.

    A batch keeps thousands: one list is less for a step to touch, and for the garbage collector to follow.
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: list[Any] = []
        """For each: time, tokens, accepted drafts, whether a grammar forced them, the number of drafts, and these."""

    def add(self, now: float, drafted: Proposals, num_tokens: int, num_accepted: int) -> None:
        """Notes a step at the time `now`: its drafts, and how many tokens it emitted and drafts it accepted."""
        ids, numbers = drafted.token_ids, self._numbers
        numbers += (now, num_tokens, num_accepted, drafted.is_forced, len(ids))
        numbers += ids

    def read(self, token_ids: Sequence[int], place: int = 0, begin: int = 0) -> Emitted:
        """Emissions from a place on, the first of them of token number `begin` of the answer `token_ids`."""
        numbers, times, steps = self._numbers, list[float](), list[Step]()
        while place < len(numbers):
            now, num_tokens, num_accepted, is_forced, num_drafts = numbers[place : place + 5]
            place += 5 + num_drafts
            times.append(now)
            if begin > 0:
                step = Step(
                    token_ids=tuple(token_ids[begin : begin + num_tokens]),
                    proposals=tuple(numbers[place - num_drafts : place]),
                    accepted=num_accepted,
                    is_forced=is_forced,
                )
                steps.append(step)
            begin += num_tokens
        return Emitted(times, steps, place)
