# SPDX-License-Identifier: Apache-2.0
"""Measured costs of a step by draft length."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

import numpy as np

SAMPLES = 5
"""Last probes of a length whose median counts."""
NOISE = 0.05
"""Standard deviation of one probe's ratio; single steps vary by 0.1 on a shared machine."""


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
