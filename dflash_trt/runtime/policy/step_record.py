# SPDX-License-Identifier: Apache-2.0
"""The record by which policies learn what a step did and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class FreeBlock(NamedTuple):
    """A block whose drafts could be greedy or drawn."""

    temperature: float
    drawn: bool
    accepted: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a step for all of its requests."""

    proposed: Sequence[int]
    """Drafts that each block verified, none of the tokens that a grammar forced; empty if only prompts were read."""
    accepted: Sequence[int]
    """Drafts among them that each block accepted."""
    free: Sequence[FreeBlock] = ()
    """The blocks with drafts that could be greedy or drawn."""
    num_prompt_tokens: int
    """Prompt tokens that the same pass read."""
    seconds: float
    """Time of the whole step, but for what the host reports of it."""
