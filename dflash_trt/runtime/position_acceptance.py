# SPDX-License-Identifier: Apache-2.0
"""How often the draft token at each position holds, as verify passes show it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

DECAY = 0.98
"""Weight of older passes against the next one: a memory of about 50 passes."""
PRIOR = 2.0
"""Passes' weight of the guess that a position holds as often as the one before it."""
FIRST = 0.5
"""That guess for the first position."""
POOLED = 6.0
"""Passes' weight of the guess that one request's drafts hold as often as all requests'."""


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

    def fade(self, begin: int) -> None:
        """A pass that did not look at the positions from `begin` on: what is known of them becomes less certain."""
        for position in range(begin, self.num_positions):
            self._judged[position] *= DECAY
            self._accepted[position] *= DECAY

    def shares(self) -> list[float]:
        """How often each position holds where all before it did.

        A position seldom judged is taken to hold as often as the one before it.
        """
        shares, share = [], FIRST
        for accepted, judged in zip(self._accepted, self._judged, strict=True):
            share = (accepted + PRIOR * share) / (judged + PRIOR)
            shares.append(share)
        return shares

    def reached(self, prior: Sequence[float] | None = None) -> list[float]:
        """P(1) .. P(K), the share of passes that accept position i and all before it.

        `prior` are the shares of all requests together, which what is seldom judged here is taken to have.
        """
        if prior is None:
            return list(accumulate(self.shares(), mul))
        counts = zip(self._accepted, self._judged, prior, strict=True)
        own = ((accepted + POOLED * share) / (judged + POOLED) for accepted, judged, share in counts)
        return list(accumulate(own, mul))

    def expected_tokens(self) -> list[float]:
        """1 + P(1) + .. + P(k) by k = 0 .. K."""
        return list(accumulate(self.reached(), initial=1.0))
