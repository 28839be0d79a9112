# SPDX-License-Identifier: Apache-2.0
"""The record by which policies learn what a step did and cost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of one request's block."""

    proposed: int
    """Drafts that were verified; none of the tokens that a grammar forced."""
    accepted: int
    temperature: float
    drawn: bool | None
    """Whether the drafts were drawn; None where they must be greedy."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a step for all of its requests."""

    blocks: Sequence[BlockRecord]
    """Blocks of the requests that decoded; empty where the step only read prompts."""
    num_prompt_tokens: int
    """Prompt tokens that the same pass read."""
    seconds: float
    """Time of the whole step."""
