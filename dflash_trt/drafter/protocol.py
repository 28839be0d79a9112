# SPDX-License-Identifier: Apache-2.0
"""What the decode loop asks of a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from dflash_trt.checkpoint.draft_spec import DraftSpec


class Drafter(Protocol):
    """The running draft model: one context per slot, one pass per block."""

    spec: DraftSpec

    def inject(self, slot: int, taps: torch.Tensor) -> None:
        """Appends context rows made from the taps [T, A*H] of T verified tokens to a slot's context."""

    def draft(self, slot: int, noise_embeds: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] of a block whose token embeddings are noise_embeds [S, H]; changes no context."""

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
