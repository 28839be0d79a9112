# SPDX-License-Identifier: Apache-2.0
"""What the decode loop asks of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one pass of the target says about the n tokens it was given."""

    next_tokens: torch.Tensor
    """[n] int64: the greedy choice after each token; after a prefill [1], after the last token only."""
    taps: torch.Tensor
    """[n, A*H]: the tapped hidden states of each token, taps concatenated in the draft's order."""


class Target(Protocol):
    """The running target model with the cache of one sequence."""

    def prefill(self, token_ids: Sequence[int]) -> Verified:
        """Begins a new sequence with a prompt."""

    def verify(self, token_ids: Sequence[int]) -> Verified:
        """Appends tokens to the sequence; a `rollback` follows before the next pass."""

    def rollback(self, num_tokens: int) -> None:
        """Takes the last `num_tokens` >= 0 tokens back out of the sequence."""

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Input embeddings [n, H]."""

    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy choice [n] int64 of the lm_head for hidden states [n, H]."""
