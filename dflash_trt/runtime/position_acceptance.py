# SPDX-License-Identifier: Apache-2.0
"""How often the draft token at each position holds, as verify passes show it."""

from __future__ import annotations

DECAY = 0.98
"""Weight of older passes against the next one: a memory of about 50 passes."""
PRIOR = 2.0
"""Passes' weight of the guess that a position holds as often as the one before it."""


class Acceptance:
    """Decayed counts by position, of passes in which all drafts before it were accepted."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._judged = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def observe(self, proposed: int, accepted: int) -> None:
        """Counts a pass that verified `proposed` drafts and accepted the first `accepted`."""
        for position in range(proposed):  # all fade: what is seldom reached would else be believed for ever
            self._judged[position] = DECAY * self._judged[position] + (position <= accepted)
            self._accepted[position] = DECAY * self._accepted[position] + (position < accepted)

    def expected_tokens(self) -> list[float]:
        """1 + P(1) + .. + P(k) by k = 0 .. K, P(i) being the share of passes that accept position i and all before it.

        A position seldom judged is taken to hold as often as the one before it.
        """
        tokens, reached, share = 1.0, 1.0, 1.0
        expected = [tokens]
        for accepted, judged in zip(self._accepted, self._judged, strict=True):
            share = (accepted + PRIOR * share) / (judged + PRIOR)
            reached *= share
            tokens += reached
            expected.append(tokens)
        return expected
