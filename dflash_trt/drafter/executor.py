# SPDX-License-Identifier: Apache-2.0
"""What executes the two graphs of an engine directory: ONNX Runtime, or TensorRT with their plans.

It holds no slots and no context of its own: whoever calls it owns the context cache and binds it. That is `Drafter` in
our runtime, and the DFlash worker inside TensorRT-LLM.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class DraftInputs(NamedTuple):
    """What draft.onnx reads beside the context cache, by the names it has there."""

    noise_embeds: Tensor
    """[B, S, H] any float."""
    positions: Tensor
    """[B, S] any integer."""
    slot_ids: Tensor
    """[B] any integer; for ONNX Runtime also [B, M], the pages that hold each block's context, one after the other."""
    context_lengths: Tensor
    """[B] any integer: the rows of its slot that each block sees."""


class Executor(Protocol):
    """Both graphs on one device; calls take their place behind what torch's current stream holds, and before the rest.

    No call on a GPU waits for it, except ONNX Runtime's, which has no other way.
    """

    cache_dtype: torch.dtype
    """Of the context cache, and so of its rows."""

    @property
    def device(self) -> torch.device:
        """Where all tensors are, given and returned."""

    def cache_rows(self, num_slots: int) -> int | None:
        """C, the rows that each slot of a context cache of `num_slots` has; None where slots consist of pages.

        Raises EngineError for more slots than the graphs were compiled for.
        """

    def load(self) -> None:
        """Reads the files, once; before that nothing is allocated."""

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Takes caches [slots, L, C, G, D] of `cache_dtype`, or of pages, which `draft` reads from then on.

        Never during a CUDA graph's capture. Raises EngineError where they are larger than the graphs were compiled for.
        """

    def release(self) -> None:
        """Lets go of the bound caches, so that their owner can allocate others in their place; `bind` comes next."""

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] of taps [T, A*H] at positions [T], T >= 1; the next call may overwrite them."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H] in the dtype of `noise_embeds`, B >= 1; the bound caches are only read."""

    def propose(self, inputs: DraftInputs) -> Tensor:
        """The proposals [B, S-1] int64 of a draft with a head of its own, from the same pass."""

    def candidates(self, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, S, H] FLOAT, candidate ids [B, S-1, k] int64 and their logits FLOAT, of a draft with a head of its
        own and a candidate selector; the next call may overwrite them."""
