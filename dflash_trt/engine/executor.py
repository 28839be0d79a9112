# SPDX-License-Identifier: Apache-2.0
"""The interface of executors of an engine directory's graphs: ONNX Runtime, torch, or TensorRT with plans.

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


class CorrelatorInputs(NamedTuple):
    """The inputs of a LiLiCorr draft's correlator, of K slots or the first few of them."""

    candidate_embeds: Tensor
    """[B, K, k, H] any float: the target's embeddings of the candidates, the best of each slot first."""
    candidate_log_probs: Tensor
    """[B, K, k] FLOAT: over the whole vocabulary."""
    slot_hidden: Tensor
    """[B, K, H] any float: final hidden rows of the slots."""
    anchor_hidden: Tensor
    """[B, H] any float: context_hidden of the last verified tokens."""

    def padded(self, num_slots: int) -> dict[str, Tensor]:
        """The graph's inputs by name, with zeros up to its `num_slots`."""
        count, device = self.slot_hidden.shape[1], self.slot_hidden.device
        given = self._asdict()
        for name in () if count == num_slots else self._fields[:3]:
            tensor = given[name]
            given[name] = tensor.new_zeros(len(tensor), num_slots, *tensor.shape[2:])
            given[name][:, :count] = tensor
        return given | {"num_slots": torch.full((1,), count, dtype=torch.int32, device=device)}


class Executor(Protocol):
    """The graphs on one device; calls are ordered on torch's current stream.

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

    def correlate(self, inputs: CorrelatorInputs) -> Tensor:
        """Scores [B, K, k, k] FLOAT of each candidate after each of the slot before, of a LiLiCorr draft, B >= 1.

        K is that of the inputs. The next call may overwrite them.
        """
