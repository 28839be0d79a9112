# SPDX-License-Identifier: Apache-2.0
"""What the drafter module asks of an engine directory's two graphs, whoever executes them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Plans(Protocol):
    """Both graphs on one device; every call is queued on torch's current stream, none waits for the device."""

    cache_dtype: torch.dtype
    """Of the context cache, and so of its rows."""

    def load(self) -> None:
        """Reads the files, once; before that nothing is allocated."""

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Takes caches [slots, L, C, G, D], which `draft` reads from then on; never during a graph's capture."""

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] of taps [T, A*H] at positions [T]; the caller may overwrite them."""

    def draft(self, noise_embeds: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """hidden [B, S, H] of blocks noise_embeds [B, S, H] at positions [B, S] after `lengths` [B] rows of `slots`."""
