# SPDX-License-Identifier: Apache-2.0
"""How often the draft token at each position holds, as verify passes show it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul

import numpy as np
import numpy.typing as npt

DECAY = 0.98
"""Weight of older steps against the next one: a memory of about 50 steps."""
PRIOR = 2.0
"""Passes' weight of the guess that a position holds as often as the one before it."""
FIRST = 0.5
"""That guess for the first position."""
POOLED = 6.0
"""Passes' weight of the guess that one request's drafts hold as often as all requests'."""

MAX_TOLD = 64
"""Steps that wait to be counted: many at once cost hardly more than one."""


class Acceptance:
    """Decayed counts by position of passes that accepted all drafts before it: of all requests, and of each."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._positions = np.arange(num_positions)
        self._pooled = np.zeros((2, num_positions))
        """Judged, and accepted [2, K]."""
        self._own = np.zeros((2, 0, num_positions))
        """The same by row of one slot [2, rows, K]."""
        self._rows: dict[int, int] = {}
        """By slot."""
        self._free_rows: list[int] = []
        self._left_rows: list[int] = []
        """Of slots whose requests have ended, which steps that wait may tell of."""
        self._told: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = []

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes a step: of the request in each slot how many drafts it verified, and how many of them it accepted."""
        self._told.append(([self._row(slot) for slot in slots], proposed, accepted))
        if len(self._told) == MAX_TOLD:
            self._count()

    def release(self, slot: int) -> None:
        """Forgets what is known of a slot's request."""
        if (row := self._rows.pop(slot, None)) is not None:
            self._left_rows.append(row)

    def reached(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """P(1) .. P(K) [B, K], the share of each slot's passes that accept position i and all before it.

        What is seldom judged there is taken to hold as often as for all requests together.
        """
        shares = np.array(self._shares())
        rows = [self._row(slot) for slot in slots]
        judged, accepted = self._own[:, rows]
        return np.cumprod((accepted + POOLED * shares) / (judged + POOLED), axis=1)

    def expected_tokens(self) -> list[float]:
        """1 + P(1) + .. + P(k) by k = 0 .. K, of all requests together."""
        return list(accumulate(accumulate(self._shares(), mul), initial=1.0))

    def _shares(self) -> list[float]:
        """How often each position holds where all before it did.

        A position seldom judged is taken to hold as often as the one before it.
        """
        self._count()
        shares, share = [], FIRST
        for judged, accepted in self._pooled.T.tolist():
            share = (accepted + PRIOR * share) / (judged + PRIOR)
            shares.append(share)
        return shares

    def _count(self) -> None:
        """Counts the N passes that were told of.

        With each step older ones fade: of all requests together at the positions that it verified, because what is
        seldom reached would else be believed for ever; of its own requests at all of them, because what it did not look
        at becomes less certain.
        """
        if self._told:
            self._count_told()
        self._own[:, self._left_rows] = 0
        self._free_rows += self._left_rows
        self._left_rows = []

    def _count_told(self) -> None:
        lengths = [len(step[0]) for step in self._told]
        rows, proposed, accepted = (np.array([*chain(*values)]) for values in zip(*self._told, strict=True))
        steps = np.repeat(np.arange(len(lengths)), lengths)
        self._told = []
        verified = self._positions < proposed[:, None]
        held = self._positions < accepted[:, None]
        seen = np.stack([verified & (self._positions <= accepted[:, None]), held])  # [2, N, K]

        looked = np.logical_or.reduceat(verified, np.flatnonzero(np.diff(steps, prepend=-1)))
        later = looked[::-1].cumsum(axis=0)[::-1]  # steps from each on
        self._pooled = DECAY ** later[0] * self._pooled + (seen * DECAY ** (later - looked)[steps]).sum(axis=1)

        self._own *= DECAY ** np.bincount(rows, minlength=self._own.shape[1])[:, None]
        for own, judged in zip(self._own, seen, strict=True):
            np.add.at(own, rows, judged * DECAY ** (steps[-1] - steps)[:, None])

    def _row(self, slot: int) -> int:
        """The slot's, its own until its request has ended."""
        if (row := self._rows.get(slot)) is None:
            if not self._free_rows:
                number = self._own.shape[1]
                self._own = np.pad(self._own, ((0, 0), (0, max(4, number)), (0, 0)))
                self._free_rows = list(range(number, self._own.shape[1]))[::-1]
            row = self._rows[slot] = self._free_rows.pop()
        return row
