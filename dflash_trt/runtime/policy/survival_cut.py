# SPDX-License-Identifier: Apache-2.0
"""Ends blocks early where a draft says that its tokens will not survive."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise, takewhile


class SurvivalCut:
    """Ends a block before the first draft that costs more than it brings, by the confidence head of a DSpark draft.

    Steps are cut only between measurements, which are of whole lengths.
    """

    def __init__(self) -> None:
        self.is_cutting = False
        """Whether the present step is cut: then it shows neither the cost of a length nor plain acceptance."""
        self._has_survival = False
        self._least_survival: list[float] = []
        """By position, of a draft that is worth its cost; empty before a plan."""

    def plan(self, tokens_per_cost: Sequence[float]) -> None:
        """Sets the tokens that each length 0 .. K must bring for its cost; () cuts nothing until the next plan."""
        self._least_survival = [after - before for before, after in pairwise(tokens_per_cost)]
        self._least_survival[:1] = self._least_survival[1:2]  # the first length's cost has the drafter's, spent by then

    def begin_step(self, *, may_cut: bool) -> bool:
        """Decides whether to cut a step; returns whether it is the first measured one after cut steps."""
        was_cutting = self.is_cutting
        self.is_cutting = may_cut and self._has_survival and bool(self._least_survival)
        return was_cutting and not may_cut

    def length(self, survival: Sequence[float]) -> int:
        """Drafts to verify of a request whose drafts survive with these probabilities."""
        self._has_survival = True
        if not self.is_cutting:
            return len(survival)
        return sum(1 for _ in takewhile(bool, map(operator.ge, survival, self._least_survival)))
