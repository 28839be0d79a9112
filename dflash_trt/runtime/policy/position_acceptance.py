# SPDX-License-Identifier: Apache-2.0
"""Acceptance at each position of the last verify passes, and the tokens that each draft length would bring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MEMORY = 200
"""Verify passes that acceptance at a position is counted over; it changes with the text."""


class PositionAcceptance:
    """Counts by position: passes that judged its draft, having accepted all before it, and those that accepted it."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._judged, self._accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
        self._new_passes = Counter[tuple[int, int]]()

    def add(self, passes: Iterable[tuple[int, int]]) -> None:
        """Counts passes, each by its proposed and accepted drafts."""
        self._new_passes.update(passes)

    def expected_tokens(self) -> list[float]:
        """Expected tokens of a pass that verifies k = 0 .. K drafts: 1 + P(1) + .. + P(k)."""
        for (proposed, accepted), passes in self._new_passes.items():
            for i in range(min(proposed, accepted + 1)):
                self._judged[i] += passes
                self._accepted[i] += passes * (i < accepted)
        self._new_passes.clear()
        tokens, reached, share = [1.0], 1.0, 0.5
        for i, judged in enumerate(self._judged):
            share = (self._accepted[i] + 2 * share) / (judged + 2)  # where few judged it, as at the position before
            reached *= share
            tokens.append(tokens[-1] + reached)
            if judged > MEMORY:
                self._judged[i], self._accepted[i] = MEMORY, self._accepted[i] * MEMORY / judged
        return tokens
