# SPDX-License-Identifier: Apache-2.0
"""Chooses between greedy and drawn proposals of sampled requests without a seed, by measured acceptance.

Either keeps the target's distribution, whatever decided between them, as long as that was only what came before the
block (docs/sampling.md). Which accepts more depends on the draft: drawn ones where its distribution is the target's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_trt.runtime.drafter.proposals import Draw, Proposals

if TYPE_CHECKING:
    from dflash_trt.runtime.request import Request

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
    """What accepted more so far at about the same temperature; at first each in turn.

    Later the other way is tried in block 64, 81, 100, ...: of n blocks, in the square root of n.
    """

    def __init__(self) -> None:
        self._ways: defaultdict[float, tuple[_Way, _Way]] = defaultdict(lambda: (_Way(), _Way()))
        """Greedy and drawn, by temperature."""

    def draw(self, request: Request) -> Draw | None:
        """Parameters to draw the request's next block with; None for greedy proposals."""
        draw = request.draw
        if draw is None:
            return None
        greedy, drawn = self._of(request)
        count = greedy.blocks + drawn.blocks
        if min(greedy.blocks, drawn.blocks) < ENOUGH:
            is_drawn = drawn.blocks < greedy.blocks
        else:
            is_drawn = (drawn.mean > greedy.mean) is not (math.isqrt(count) ** 2 == count)
        return draw if is_drawn else None

    def observe(self, request: Request, proposals: Proposals, num_accepted: int) -> None:
        """Counts a block that was verified."""
        if request.draw is not None and proposals.token_ids:
            way = self._of(request)[proposals.candidate_ids is not None]
            way.blocks += 1
            way.accepted += num_accepted

    def _of(self, request: Request) -> tuple[_Way, _Way]:
        return self._ways[round(request.params.temperature, 1)]
