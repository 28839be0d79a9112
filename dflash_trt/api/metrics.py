# SPDX-License-Identifier: Apache-2.0
"""Metrics of a decoder."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from dflash_trt.api.acceptance import Acceptance, AcceptanceCounter, Step
from dflash_trt.api.completion import FinishReason


class _Totals(msgspec.Struct, kw_only=True):
    """Totals since the decoder started."""

    passes: int = 0
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int] = msgspec.field(default_factory=Counter)
    """Requests that ended, by reason."""
    output_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of admitted requests, with prefix caching."""
    prefix_cache_hits: int = 0
    """Prompt tokens served from the prefix cache."""


class DecoderMetrics(_Totals, kw_only=True):
    """A reading of the decoder: its current state and its totals."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    free_slots: int
    free_cache_tokens: int
    """Tokens that fit in the unreserved pages."""
    draft_length: str
    """Drafted tokens that a step verifies now, and the reason."""
    acceptance: Acceptance
    """Counts of all verify passes since the decoder started."""

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
        """The current totals."""
        totals = {name: getattr(self, name) for name in _Totals.__struct_fields__}
        return totals | {"finished": dict(self.finished), "acceptance": self.acceptance.read()}
