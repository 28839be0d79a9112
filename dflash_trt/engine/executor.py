# SPDX-License-Identifier: Apache-2.0
"""The interface of executors of an engine directory's two graphs: ONNX Runtime, torch, or TensorRT with plans.

An executor holds no slots and no context: its caller owns the context cache and binds it. The callers are `Drafter` in
the embedded runtime and the DFlash worker inside TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], None]
"""Replaces each rank's rows [R, H] with the sum over all ranks, in the current stream's order; every rank calls it."""


class DraftInputs(NamedTuple):
    """The inputs of a draft pass for any executor; the context itself is bound."""

    noise_embeds: Tensor
    """[B, S, H] any float."""
    positions: Tensor
    """[B, S] any integer."""
    page_ids: Tensor
    """[B, M] any integer: the bound pages that hold each block's context, in order."""
    context_lengths: Tensor
    """[B] any integer: context rows that each block sees."""


class Executor(Protocol):
    """Both graphs on one device; calls are ordered on torch's current stream.

    On a GPU no call waits for its result.
    """

    cache_dtype: torch.dtype
    """Dtype of the context cache."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors, given and returned."""

    def cache_rows(self, num_slots: int) -> int | None:
        """Largest number of rows per slot that the graphs were compiled for; None without such a limit.

        Raises EngineError for more slots than the graphs were compiled for.
        """

    def load(self) -> None:
        """Reads the files, once. Allocates nothing before."""

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Binds caches [pages, L, rows, G, D] of `cache_dtype`, which `draft` reads from then on; the caller owns them.

        Never during a CUDA graph's capture.
        """

    def bind_pool(self, layers: Sequence[Tensor], max_pages: int) -> None:
        """Binds a pool instead: views [pages, 2, G, rows, D] of `cache_dtype`, one a layer; M is at most `max_pages`.

        Raises EngineError for a pool that the graphs cannot read.
        """

    def release(self) -> None:
        """Drops the bound caches, so that their owner can free them; `bind` comes next."""

    def close(self) -> None:
        """Frees caches and graphs now; the last call."""

    def context(self, taps: Tensor, positions: Tensor) -> Mapping[str, Tensor]:
        """The context graph's outputs by name, of taps [T, A*H] at positions [T], T >= 1.

        kv [T, 2, L, G, D] of `cache_dtype`; and context_hidden [T, H], any float, of a LiLiCorr draft. The next call
        may overwrite them.
        """

    def draft(self, inputs: DraftInputs) -> Mapping[str, Tensor]:
        """The draft graph's outputs by name, B >= 1; the bound caches are only read.

        hidden [B, S, H], any float; token_ids [B, K], or candidate_ids and candidate_logits [B, K, k], of a draft with
        a head of its own; and [B, S, H] of each value that the executor was opened to expose. The next call may
        overwrite them.
        """
