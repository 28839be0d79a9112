# SPDX-License-Identifier: Apache-2.0
"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from dflash_trt.checkpoint.draft_spec import DraftSpec


class Drafter(Protocol):
    """The running draft model: a context for each slot, one pass for the blocks of all of them."""

    spec: DraftSpec
    cache_bytes_per_token: int
    """What one context row of one slot takes."""

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor) -> None:
        """Appends context rows made from the taps [T, A*H] of T verified tokens.

        The first num_rows[0] of them go to slots[0], the next num_rows[1] to slots[1], ...
        """

    def draft(self, slots: Sequence[int], noise_embeds: torch.Tensor) -> torch.Tensor:
        """hidden [B, S, H] of blocks with embeddings noise_embeds [B, S, H], each right after its slot's context.

        Changes no context.
        """

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
