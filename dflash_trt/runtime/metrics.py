# SPDX-License-Identifier: Apache-2.0
"""What a decoder has done since it was made."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import msgspec

from dflash_trt.runtime.request import FinishReason, Step


class _Totals(msgspec.Struct, kw_only=True):
    """Sums since the decoder was made."""

    passes: int = 0
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int] = msgspec.field(default_factory=Counter)
    """Requests that ended, by reason."""
    output_tokens: int = 0
    steps: int = 0
    """Verify passes, counted once for each request in them."""
    drafts: int = 0
    """The verify passes among them that verified draft tokens."""
    proposed: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of admitted requests, where prefixes are cached."""
    prefix_cache_hits: int = 0
    """Those among them that no pass had to compute."""


class DecoderMetrics(_Totals, kw_only=True):
    """A reading: what the decoder does now, and its totals."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    free_slots: int
    free_cache_tokens: int
    """Room that no request has reserved."""
    draft_length: str
    """How many drafted tokens a step verifies now, and why."""
    tau: float | None
    """Tokens that verify passes emitted / steps; None without a step."""
    accepted_by_position: dict[int, int]
    """Verify passes that accepted the draft token at position 1, 2, ... and so all before it."""


class Counts(_Totals):
    """Running totals of one decoder."""

    step_tokens: int = 0
    """`output_tokens` but for the first of each request, which its prefill emits."""
    accepted_counts: dict[int, int] = msgspec.field(default_factory=Counter)
    """Steps by how many drafts they accepted."""

    def add_step(self, step: Step) -> None:
        """Counts a request's verify pass."""
        self.steps += 1
        self.step_tokens += len(step.token_ids)
        self.output_tokens += len(step.token_ids)
        self.drafts += step.proposed > 0
        self.proposed += step.proposed
        self.accepted += step.accepted
        self.accepted_counts[step.accepted] += 1

    def read(self) -> dict[str, Any]:
        """The totals as they stand now, and what follows from them: tau and acceptance by position."""
        totals = {name: getattr(self, name) for name in _Totals.__struct_fields__}
        most = max(self.accepted_counts, default=0)
        reached = list(accumulate(self.accepted_counts.get(count, 0) for count in range(most, 0, -1)))[::-1]
        totals |= {"finished": dict(self.finished), "accepted_by_position": dict(enumerate(reached, start=1))}
        return totals | {"tau": self.step_tokens / self.steps if self.steps else None}
