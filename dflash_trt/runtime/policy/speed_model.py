# SPDX-License-Identifier: Apache-2.0
"""Measurements for AutoLength: acceptance by position, cost by draft length, and which drafts are worth theirs."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from statistics import median_low

import numpy as np

MEMORY = 200
"""Verify passes that acceptance at a position is counted over; it changes with the text."""
SAMPLES = 5
"""Last probes of a length whose median counts."""
NOISE = 0.05
"""Standard deviation of one probe's ratio; single steps vary by 0.1 on a shared machine."""


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


class CostTable:
    """Costs of steps of length 0 .. K at the batch sizes of one bucket, and the best length."""

    def __init__(self, num_draft_tokens: int, best: int) -> None:
        self.best = best
        self.next_probe = [0.0] * (num_draft_tokens + 1)
        """The first step at which each length may be probed again."""
        self._log_costs = {best: deque([0.0])}
        """Logarithms by length, from its last probes; the unit is this table's own."""

    def add(self, length: int, ratio_to_best: float) -> None:
        """Records a probe by the ratio of its steps' time to that of the best length's."""
        logs = self._log_costs.setdefault(length, deque(maxlen=SAMPLES))
        logs.append(median_low(self._log_costs[self.best]) + math.log(ratio_to_best))

    def log_costs(self) -> tuple[list[float], list[float]]:
        """Log costs by length, interpolated where not measured, and their standard deviations."""
        measured = {length: median_low(logs) for length, logs in sorted(self._log_costs.items())}
        lengths = range(len(self.next_probe))
        logs = self._log_costs
        deviations = [NOISE / math.sqrt(len(logs[length])) if length in logs else math.inf for length in lengths]
        deviations[self.best] = 0.0
        return np.interp(lengths, list(measured), list(measured.values())).tolist(), deviations


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
