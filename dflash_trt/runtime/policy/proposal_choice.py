# SPDX-License-Identifier: Apache-2.0
"""Policy of how proposals are made for requests without a seed: greedily, or drawn from the draft's distribution."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from dflash_trt.runtime.policy.step_record import StepRecord

ENOUGH = 32
"""Blocks of each way before one is believed to accept more."""


@dataclass(slots=True)
class _Way:
    blocks: int = 0
    accepted: int = 0

    @property
    def mean(self) -> float:
        """Accepted proposals of a block."""
        return self.accepted / max(1, self.blocks)


class ProposalChoice:
    """Chooses greedy or drawn proposals, by acceptance so far at about the same temperature; at first alternately.

    Both keep the target's distribution, as long as the choice depends only on earlier blocks (docs/sampling.md). Drawn
    proposals are accepted more often if the draft's distribution is close to the target's.

    Later the other way is tried in blocks 64, 81, 100, ...: sqrt(n) of n blocks.
    """

    def __init__(self) -> None:
        self._ways: defaultdict[float, tuple[_Way, _Way]] = defaultdict(lambda: (_Way(), _Way()))
        """Greedy and drawn, by temperature."""

    def is_drawn(self, temperature: float) -> bool:
        """Whether to draw the next block of a request whose proposals need not be greedy."""
        greedy, drawn = self._ways[round(temperature, 1)]
        count = greedy.blocks + drawn.blocks
        if min(greedy.blocks, drawn.blocks) < ENOUGH:
            return drawn.blocks < greedy.blocks
        return (drawn.mean > greedy.mean) is not (math.isqrt(count) ** 2 == count)

    def observe(self, step: StepRecord) -> None:
        """Counts the blocks for which there was a choice."""
        for temperature, drawn, accepted in step.free:
            way = self._ways[round(temperature, 1)][drawn]
            way.blocks += 1
            way.accepted += accepted
