# SPDX-License-Identifier: Apache-2.0
"""The cost of one verify step, term by term, and the load that it is for."""

from __future__ import annotations

import msgspec

ACTIVATION_BYTES = 2  # BF16


class Term(msgspec.Struct, frozen=True):
    name: str
    part: str
    """target, drafter, communication or host."""
    seconds: float
    bytes: float = 0.0
    """Bytes read from memory; for recurrent states also written."""


class StepCost(msgspec.Struct, frozen=True):
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def bytes(self) -> float:
        """Read from one GPU's memory."""
        return sum(term.bytes for term in self.terms)


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    batch: float
    num_draft_tokens: int
    """K; 0 decodes plainly."""
    context: float
    """Mean number of a request's tokens in the caches."""
    prompt_tokens: float = 0
    """Tokens of new requests' prompts that join the step."""
    prompts: float = 0
    """Prompts that end with them."""

    @property
    def prompt_length(self) -> float:
        """Tokens of one whole prompt."""
        return self.prompt_tokens / self.prompts if self.prompts else self.prompt_tokens
