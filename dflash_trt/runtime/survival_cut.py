# SPDX-License-Identifier: Apache-2.0
"""Ends a block before the first draft that costs more than it brings, where the drafter says how likely each one is.

Such a drafter is DSpark's, with its confidence head.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise, takewhile


class SurvivalCut:
    """Steps are cut only between measurements, which are of whole lengths."""

    def __init__(self) -> None:
        self.is_cutting = False
        """Whether the present step is cut: it says nothing of a length, and only of drafts that were likely."""
        self._has_survival = False
        self._least_survival: list[float] = []  # by position, of a draft that is worth its cost; none before a plan

    def plan(self, tokens_per_cost: Sequence[float]) -> None:
        """By length 0 .. K, the tokens that its cost must bring; () cuts nothing until the next plan."""
        self._least_survival = [after - before for before, after in pairwise(tokens_per_cost)]
        self._least_survival[:1] = self._least_survival[1:2]  # the first length's cost has the drafter's, spent by then

    def begin_step(self, *, may_cut: bool) -> bool:
        """Decides for a step; returns whether measuring begins with it, behind steps that were cut."""
        was_cutting = self.is_cutting
        self.is_cutting = may_cut and self._has_survival and bool(self._least_survival)
        return was_cutting and not may_cut

    def length(self, survival: Sequence[float]) -> int:
        """How many drafts of a request are verified that survive with these probabilities."""
        self._has_survival = True
        if not self.is_cutting:
            return len(survival)
        return sum(1 for _ in takewhile(bool, map(operator.ge, survival, self._least_survival)))
