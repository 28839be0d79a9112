# SPDX-License-Identifier: Apache-2.0
"""What executes the two graphs of an engine directory: ONNX Runtime, or TensorRT with their plans.

It holds no slots and no context of its own: whoever calls it owns the context cache and binds it. That is `Drafter` in
our runtime, and the DFlash worker inside TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], None]
"""Puts the sum of all ranks' tensors into each, in the order of the current stream; all ranks call it alike."""


class DraftInputs(NamedTuple):
    """What draft.onnx reads beside the context cache, by the names it has there."""

    noise_embeds: Tensor
    """[B, S, H] any float."""
    positions: Tensor
    """[B, S] any integer."""
    slot_ids: Tensor
    """[B] any integer, each block's page of the bound caches or row of the bound page table; of bound caches also
    [B, M], the pages that hold each block's context, one after the other."""
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
        """The most rows that a slot may have where the graphs were compiled for some; None where they were not.

        Raises EngineError for more slots than the graphs were compiled for.
        """

    def load(self) -> None:
        """Reads the files, once; before that nothing is allocated."""

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Takes caches [pages, L, rows, G, D] of `cache_dtype`, which `draft` reads from then on and their owner keeps.

        Never during a CUDA graph's capture.
        """

    def bind_pool(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        """Takes views [pages, 2, G, rows, D] of `cache_dtype`, one a layer, and [slots, M] INT32, in their place.

        Whoever owns the page table may change it between calls. Raises EngineError where the graphs cannot follow it.
        """

    def release(self) -> None:
        """Lets go of the bound caches, so that their owner can allocate others in their place; `bind` comes next."""

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] of taps [T, A*H] at positions [T], T >= 1; the next call may overwrite them."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H] in the dtype of `noise_embeds`, B >= 1; the bound caches are only read."""

    def propose(self, inputs: DraftInputs) -> Tensor:
        """The proposals [B, K] int64 of a draft with a head of its own, from the same pass."""

    def candidates(self, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, S, H] FLOAT, candidate ids [B, K, k] int64 and their logits FLOAT, of a draft with a head of its
        own whose candidates are scored; the next call may overwrite them."""
