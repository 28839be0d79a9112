# SPDX-License-Identifier: Apache-2.0
"""The verify passes of a request: integers in one list, which become `Step` objects when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.api.acceptance import Step
from dflash_trt.engine.proposals import Proposals


class Passes:
    """Verify passes, without the prefill, which emits the first token.

    A batch keeps thousands: one list is less for a step to touch, and for the garbage collector to follow.
    """

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: list[int] = []
        """Of each pass: tokens, accepted drafts, whether a grammar forced the drafts, how many there are, and these."""

    def add(self, drafted: Proposals, num_emitted: int, num_accepted: int) -> None:
        """Notes a pass: its drafts, and how many tokens it emitted and drafts it accepted."""
        ids = drafted.token_ids
        self._numbers += (num_emitted, num_accepted, drafted.is_forced, len(ids), *ids)

    def steps(self, token_ids: Sequence[int]) -> list[Step]:
        """All passes, in the answer `token_ids`."""
        return self.steps_from(0, token_ids, 1)[0]

    def steps_from(self, place: int, token_ids: Sequence[int], begin: int) -> tuple[list[Step], int]:
        """Passes from a place of the list on, the first of which emitted token number `begin`; and the list's end."""
        numbers, steps = self._numbers, list[Step]()
        while place < len(numbers):
            num_emitted, num_accepted, is_forced, num_drafts = numbers[place : place + 4]
            place += 4 + num_drafts
            step = Step(
                token_ids=tuple(token_ids[begin : begin + num_emitted]),
                proposals=tuple(numbers[place - num_drafts : place]),
                accepted=num_accepted,
                is_forced=bool(is_forced),
            )
            steps.append(step)
            begin += num_emitted
        return steps, place
