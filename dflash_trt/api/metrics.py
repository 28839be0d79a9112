# SPDX-License-Identifier: Apache-2.0
"""What a decoder has done since it was made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from dflash_trt.api.acceptance import Acceptance, AcceptanceCounter, Step
from dflash_trt.api.completion import FinishReason


class _Totals(msgspec.Struct, kw_only=True):
    """Sums since the decoder was made."""

    passes: int = 0
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int] = msgspec.field(default_factory=Counter)
    """Requests that ended, by reason."""
    output_tokens: int = 0
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
    acceptance: Acceptance
    """Of all verify passes since it was made."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass; None without one."""
        return self.acceptance.tau


class Counts(_Totals):
    """Running totals of one decoder."""

    acceptance: AcceptanceCounter = msgspec.field(default_factory=AcceptanceCounter)

    def add_step(self, step: Step) -> None:
        """Counts a request's verify pass."""
        self.output_tokens += len(step.token_ids)
        self.acceptance.add(step)

    def read(self) -> dict[str, Any]:
        """The totals as they stand now."""
        totals = {name: getattr(self, name) for name in _Totals.__struct_fields__}
        return totals | {"finished": dict(self.finished), "acceptance": self.acceptance.read()}
