# SPDX-License-Identifier: Apache-2.0
"""Counts of accepted draft tokens, with the same names in every runtime, report and table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, zip_longest
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
NEAR_ZERO_TAU = 1.25
"""Tau below which nearly every draft is rejected: documented failures show 1.02 to 1.16."""
POOREST_TAU = 1.9
"""Tau of the poorest uses that are published as healthy."""


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens that one verify pass emitted for a request.

    Holds only numbers and tuples of numbers, so the garbage collector skips it: a batch keeps thousands.
    """

    token_ids: tuple[int, ...]
    """Accepted drafts and the token after them, cut where the answer ends."""
    proposals: tuple[int, ...]
    """Draft tokens that the pass verified, rejected ones included."""
    accepted: int
    """Draft tokens among `token_ids`."""
    is_forced: bool = False
    """Whether a grammar forced the draft tokens; the drafter did not propose them."""

    @property
    def proposed(self) -> int:
        """Number of draft tokens that the pass verified."""
        return len(self.proposals)


class Acceptance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts of verify passes. A count that the runtime does not publish is None; prefills are never counted.

    Passes over tokens that a grammar forced are counted apart, since they say nothing about the drafter.
    """

    passes: Count | None = 0
    """Verify passes, counted once for each request in them, without the forced ones."""
    drafting_passes: Count = 0
    """Verify passes that verified draft tokens."""
    emitted: Count | None = 0
    """Tokens that these passes emitted."""
    proposed: Count | None = 0
    """Draft tokens that were verified."""
    accepted: Count = 0
    """Draft tokens that were accepted."""
    accepted_by_position: tuple[Count, ...] = ()
    """Passes that accepted the draft token at position 1, 2, ... and so all before it; () where not published."""
    forced_passes: Count = 0
    """Verify passes over tokens that a grammar forced."""
    forced: Count = 0
    """Tokens that a grammar forced."""

    @property
    def all_passes(self) -> int | None:
        """Verify passes, forced ones included."""
        return _sum(self.passes, self.forced_passes)

    @property
    def tau(self) -> float | None:
        """Acceptance length: emitted tokens per verify pass; None without passes or published counts."""
        return self.emitted / self.passes if self.passes and self.emitted is not None else None

    @property
    def tau_of_drafting_passes(self) -> float | None:
        """Accepted drafts and the bonus token, per drafting pass; None without a drafting pass.

        Counts a bonus token also for a pass that a stop token cut, as vLLM does.
        """
        return (self.accepted + self.drafting_passes) / self.drafting_passes if self.drafting_passes else None

    @property
    def draft_length(self) -> float | None:
        """Mean draft tokens per drafting pass; None without one, or where they are not published."""
        return self.proposed / self.drafting_passes if self.drafting_passes and self.proposed is not None else None

    @property
    def shares_by_position(self) -> list[float]:
        """Share of drafting passes that accepted the draft token at position 1, 2, ..."""
        return [count / self.drafting_passes for count in self.accepted_by_position] if self.drafting_passes else []

    def __add__(self, other: Acceptance) -> Acceptance:
        """Sums of the counts; None where one side is None."""
        by_position = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return Acceptance(
            passes=_sum(self.passes, other.passes),
            drafting_passes=self.drafting_passes + other.drafting_passes,
            emitted=_sum(self.emitted, other.emitted),
            proposed=_sum(self.proposed, other.proposed),
            accepted=self.accepted + other.accepted,
            accepted_by_position=tuple(map(sum, by_position)),
            forced_passes=self.forced_passes + other.forced_passes,
            forced=self.forced + other.forced,
        )

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Acceptance:
        """Counts of these verify passes."""
        counter = AcceptanceCounter()
        counter.add(Counter((step.is_forced, step.proposed, len(step.token_ids), step.accepted) for step in steps))
        return counter.read()


class AcceptanceCounter:
    """Adds up verify passes as they come."""

    def __init__(self) -> None:
        self._passes = defaultdict[tuple[bool, int, int, int], int](int)

    def add(self, passes: Mapping[tuple[bool, int, int, int], int]) -> None:
        """Counts verify passes by: were drafts forced, how many drafts, how many tokens, and drafts among these."""
        for kind, count in passes.items():
            self._passes[kind] += count

    def read(self) -> Acceptance:
        """The current counts; by position up to the longest proposal."""
        drafting_passes = emitted = proposed = longest = forced_passes = forced = 0
        passes = Counter[int]()
        for (is_forced, num_drafts, num_tokens, accepted), count in self._passes.copy().items():
            if is_forced:
                forced_passes += count
                forced += count * accepted
                continue
            drafting_passes += count if num_drafts else 0
            emitted += count * num_tokens
            proposed += count * num_drafts
            longest = max(longest, num_drafts)
            passes[accepted] += count
        at_least = list(accumulate(passes[count] for count in range(longest, 0, -1)))[::-1]
        return Acceptance(
            passes=passes.total(),
            drafting_passes=drafting_passes,
            emitted=emitted,
            proposed=proposed,
            accepted=sum(at_least),
            accepted_by_position=tuple(at_least),
            forced_passes=forced_passes,
            forced=forced,
        )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
