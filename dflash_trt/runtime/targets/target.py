# SPDX-License-Identifier: Apache-2.0
"""Interface of a target to the decode loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch


class Segment(msgspec.Struct, frozen=True):
    """Tokens of one request in a pass, which follow those that its slot holds."""

    slot: int
    token_ids: Sequence[int]
    num_logits: int
    """Logits are computed after the last `num_logits` of the tokens: 0 inside a prompt, 1 at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of one pass over segments laid end to end; R tokens in all."""

    logits: torch.Tensor
    """[sum of num_logits, V] FLOAT."""
    tapped: Sequence[torch.Tensor] = ()
    """[R, H] or [1, R, H] each: the tapped hidden states of each token, in the draft's order; none unasked."""

    @property
    def taps(self) -> torch.Tensor:
        """[R, A*H]: what is tapped, side by side."""
        return side_by_side(self.tapped)


def side_by_side(tapped: Sequence[torch.Tensor]) -> torch.Tensor:
    """Taps [R, A*H] of A hidden states [R, H] or [1, R, H]."""
    taps = tapped[0] if len(tapped) == 1 else torch.cat(list(tapped), dim=-1)
    return taps if taps.ndim == 2 else taps.flatten(0, -2)


class Target(Protocol):
    """The running target model: a cache of one sequence for each slot, one pass for all of them.

    Subclasses have no pages unless they override `reserve`.
    """

    cache_bytes_per_token: int = 0
    """Bytes per token of a sequence in the cache."""
    cache_bytes_per_slot: int = 0
    """Bytes per slot for any sequence: recurrent state, and its copy from before the last segment."""

    keeps_prefixes: bool = False
    """Whether the pages of a released slot go on holding all that there is to know of their tokens."""

    def allocate(self, num_pages: int) -> None:
        """Allocates a GPU's memory for `num_pages` pages, if it has pages. On a CPU, and beyond `num_pages`, memory is
        allocated on first write.
        """
        return

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """Gives an empty slot the pages of its sequence, if it has pages; `num_tokens` tokens are in them already."""
        assert num_tokens == 0, "nothing is kept of a released slot"

    @abstractmethod
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends each segment to its slot's sequence; a slot occurs at most once."""

    @abstractmethod
    def rollback(self, slot: int, num_tokens: int) -> None:
        """Takes the last `num_tokens` >= 0 of the slot's last segment back; once after each `verify`."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Empties a slot."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of the embedding table for token ids [...] int64, without the factor that Gemma gives them."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lm_head's logits [..., V] for hidden states [..., H]."""
