# SPDX-License-Identifier: Apache-2.0
"""A target that runs one request after the other, on transformers' own caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Verified

CONVOLUTION_WIDTH = 4
"""Tokens after which the convolutions of known models keep no more: Qwen3-Next's, Qwen3.5's and Kimi-Linear's."""


class SequentialTarget(HuggingFaceTarget):
    """One forward call a segment, on one of transformers' own caches a slot."""

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int], num_slots: int) -> None:
        """Raises CheckpointError for a model whose tokens cannot be taken back."""
        super().__init__(model, target_layer_ids)
        self._caches: list[DynamicCache | None] = [None] * num_slots
        self._last: list[tuple[DynamicCache | None, Sequence[int]]] = [(None, ())] * num_slots
        """A slot's last segment, and its cache before it where that cannot be cropped."""
        self._check_rollback()
        self.cache_bytes_per_slot, self.cache_bytes_per_token = self._measure_cache()

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends the segments one after the other."""
        parts = [self._append(segment, with_taps=with_taps) for segment in segments]
        tapped = [torch.cat(rows, dim=-2) for rows in zip(*(part.tapped for part in parts), strict=True)]
        return Verified(logits=torch.cat([part.logits for part in parts]), tapped=tapped)

    @torch.inference_mode()
    def rollback(self, slot: int, num_tokens: int) -> None:
        """Crops the cache; with 0 it still trims sliding windows back to their size.

        Recurrent state cannot be cropped (transformers 5.23 crops around it): it is computed again from before the
        segment.
        """
        cache, (before, token_ids) = self._caches[slot], self._last[slot]
        assert cache is not None, f"slot {slot} is empty"
        if before is not None and num_tokens > 0:
            self._caches[slot] = before
            accepted = token_ids[: len(token_ids) - num_tokens]
            self._append(Segment(slot=slot, token_ids=accepted, num_logits=0), with_taps=False)
            before.crop(0)
        else:
            cache.crop(-num_tokens)

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._caches[slot], self._last[slot] = None, (None, ())

    def _append(self, segment: Segment, *, with_taps: bool) -> Verified:
        cache = self._caches[segment.slot]
        if cache is None:
            cache = self._caches[segment.slot] = DynamicCache(config=self.model.config)
            cache.activate_past_recording()  # without it a full sliding window cannot be rolled back
        before = None if cache.is_croppable else copy.deepcopy(cache)
        self._last[segment.slot] = before, segment.token_ids
        num_tokens = len(segment.token_ids)
        rows = range(num_tokens - segment.num_logits, num_tokens)
        return self._forward(segment.token_ids, rows, with_taps=with_taps, past_key_values=cache, use_cache=True)

    def _check_rollback(self) -> None:
        expectation = (
            "model_type: expected a model from whose cache transformers can take tokens back, found"
            f" {self.model.config.model_type}"
        )
        try:
            leaves_trace = self._leaves_trace()
        except (
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # as its code stumbles over the cache
            raise CheckpointError(f"{expectation}: {error}") from error
        if leaves_trace:
            raise CheckpointError(f"{expectation}: its output would change with rejected drafts")

    def _leaves_trace(self) -> bool:
        """Whether tokens that were appended and taken back show in what comes after."""
        expected = self._logits_after([0, 1, 0])
        self.release(0)
        self._logits_after([0, 2, 2])
        self.rollback(0, 2)
        actual = self._logits_after([1, 0])
        self.release(0)
        return bool((actual - expected).abs().max() > 1e-3 * expected.abs().max())

    def _logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.verify([Segment(slot=0, token_ids=token_ids, num_logits=1)], with_taps=False).logits

    def _measure_cache(self) -> tuple[int, int]:
        """Bytes of a cache for any sequence, with the copy that a rollback needs, and bytes per token."""
        sizes = []
        for token_ids in ([0] * CONVOLUTION_WIDTH, [0]):
            self.verify([Segment(slot=0, token_ids=token_ids, num_logits=0)], with_taps=False)
            self.rollback(0, 0)
            cache = self._caches[0]
            assert cache is not None
            sizes.append(sum(_num_bytes(layer) for layer in cache.layers))
        self.release(0)
        growth = sizes[1] - sizes[0]
        return 2 * (sizes[0] - CONVOLUTION_WIDTH * growth), growth


def _num_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors, and of its recurrent state, which is in dicts."""
    values = [v for value in vars(layer).values() for v in (value.values() if isinstance(value, dict) else (value,))]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
