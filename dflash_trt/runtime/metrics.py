# SPDX-License-Identifier: Apache-2.0
"""What a decoder has done since it was made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from dflash_trt.runtime.request import FinishReason, Step


class DecoderMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A reading; counts are since the decoder was made."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    free_slots: int
    free_cache_tokens: int
    """Room that no request has reserved."""
    passes: int
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int]
    """Requests that ended, by reason."""
    output_tokens: int
    steps: int
    """Verify passes, counted once for each request in them."""
    proposed: int
    accepted: int
    accepted_by_position: dict[int, int]
    """Verify passes that accepted the draft token at position 1, 2, ... and so all before it."""
    tau: float | None
    """Tokens that verify passes emitted / steps; None without a step."""


@dataclass
class Counts:
    """Running totals of one decoder."""

    passes: int = 0
    output_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_by_position: Counter[int] = field(default_factory=Counter)
    finished: Counter[FinishReason] = field(default_factory=Counter)

    def add_step(self, step: Step) -> None:
        """Counts a request's verify pass."""
        self.steps += 1
        self.step_tokens += len(step.token_ids)
        self.output_tokens += len(step.token_ids)
        self.proposed += step.proposed
        self.accepted += step.accepted
        self.accepted_by_position.update(range(1, step.accepted + 1))
