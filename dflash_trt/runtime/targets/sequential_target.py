# SPDX-License-Identifier: Apache-2.0
"""A target that runs one request after the other, on transformers' own caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.self_test import disagreement, fails_blocks_only
from dflash_trt.runtime.targets.target import Segment, Verified

T = TypeVar("T")
CONVOLUTION_WIDTH = 4
"""Tokens after which the convolutions of known models keep no more: Qwen3-Next's, Qwen3.5's and Kimi-Linear's."""


class CacheKind(NamedTuple):
    """How a sequence is kept, and how its last tokens are taken back."""

    name: str
    make: Callable[[Any], DynamicCache | None]
    """Makes an empty cache for a configuration; None where the model makes its own in the first pass."""
    crops: bool
    """Whether rejected tokens are cropped; else the accepted ones are computed again, on a copy from before them."""


def _recording(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.activate_past_recording()  # without it a full sliding window cannot be rolled back
    return cache


CACHE_KINDS = (
    CacheKind("cropped", _recording, crops=True),
    CacheKind("copied", lambda config: DynamicCache(config=config), crops=False),
    CacheKind("the model's own, copied", lambda config: None, crops=False),
)
"""In this order: the first that leaves no trace of rejected tokens is taken."""


class SequentialTarget(HuggingFaceTarget):
    """One forward call a segment, on one of transformers' own caches a slot."""

    def __init__(
        self,
        model: PreTrainedModel,
        target_layer_ids: Sequence[int],
        num_slots: int,
        tap_hidden_size: int | None = None,
    ) -> None:
        """Raises CheckpointError for a model whose tokens cannot be taken back, or whose taps are not the layers'."""
        super().__init__(model, target_layer_ids, tap_hidden_size)
        self._caches: list[Any] = [None] * num_slots
        self._lengths = [0] * num_slots
        self._last: list[tuple[Any, Sequence[int]]] = [(None, ())] * num_slots
        """A slot's last segment, and a copy of its cache from before it where that is not cropped."""
        self._kind = self._find_cache()
        self.cache_bytes_per_slot, self.cache_bytes_per_token = self._measure_cache()

    def _computed(self) -> str:
        attention = self.model.config.get_text_config()._attn_implementation
        return f"requests one after the other, transformers' {attention} attention, {self._kind.name} cache"

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends the segments one after the other."""
        parts = [self._append(segment, with_taps=with_taps) for segment in segments]
        tapped = [torch.cat(rows, dim=-2) for rows in zip(*(part.tapped for part in parts), strict=True)]
        return Verified(logits=torch.cat([part.logits for part in parts]), tapped=tapped)

    @torch.inference_mode()
    def rollback(self, slot: int, num_tokens: int) -> None:
        """Crops the cache, or computes the accepted tokens again from before the segment.

        Cropping 0 tokens still trims sliding windows back to their size.
        """
        before, token_ids = self._last[slot]
        if self._kind.crops:
            self._caches[slot].crop(-num_tokens)
            self._lengths[slot] -= num_tokens
        elif num_tokens > 0:
            assert num_tokens < len(token_ids), "the first token of a segment stays"
            self._caches[slot] = before
            self._lengths[slot] -= len(token_ids)
            accepted = token_ids[: len(token_ids) - num_tokens]
            self._append(Segment(slot=slot, token_ids=accepted, num_logits=0), with_taps=False)

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._caches[slot], self._lengths[slot], self._last[slot] = None, 0, (None, ())

    def _append(self, segment: Segment, *, with_taps: bool) -> Verified:
        slot, num_tokens = segment.slot, len(segment.token_ids)
        begin = self._lengths[slot]
        cache = self._kind.make(self.model.config) if begin == 0 else self._caches[slot]
        is_copied = not self._kind.crops and num_tokens > 1  # of one token, nothing is taken back
        self._last[slot] = copy.deepcopy(cache) if is_copied else None, segment.token_ids
        inputs: dict[str, Any] = {"position_ids": self._positions(begin, num_tokens)} if self._takes_positions else {}
        rows = range(num_tokens - segment.num_logits, num_tokens)
        inputs[self._cache_argument] = cache
        verified = self._forward(segment.token_ids, rows, with_taps=with_taps, use_cache=True, **inputs)
        self._caches[slot] = cache if self._cache_after is None else self._cache_after
        self._lengths[slot], self._cache_after = begin + num_tokens, None
        return verified

    def _positions(self, begin: int, num_tokens: int) -> torch.Tensor:
        return torch.arange(begin, begin + num_tokens, device=self._device)[None]

    def _find_cache(self) -> CacheKind:
        """The first kind of cache whose rolled back sequences equal uncached passes over what they hold."""
        takes_positions = self._takes_positions
        reasons: dict[str, str] = {}
        for self._takes_positions in sorted({takes_positions, False}, reverse=True):  # RoBERTa counts from 2
            for self._kind in CACHE_KINDS:
                if (reason := self._attempt(self._fault)) is None:
                    return self._kind
                reasons.setdefault(reason, self._kind.name)
                if reason.startswith("taps"):  # after logits that agree: of no cache's making
                    raise self._refusal(f"{reason} ({self._kind.name} cache)")
        found = "; ".join(f"{reason} ({kind} cache)" for reason, kind in reasons.items())
        if any(self._attempt(lambda: fails_blocks_only(self)) is True for self._kind in CACHE_KINDS):
            found = "one that continues a sequence by one token a pass only, and drafts are verified as a block"
        raise self._refusal(found)

    def _refusal(self, found: str) -> CheckpointError:
        return CheckpointError(
            "model_type: expected a target that computes a sequence in blocks, and with tokens taken back, as it does"
            f" the whole, found {self.model.config.model_type}: {found}"
        )

    def _fault(self) -> str | None:
        return (self._uncropped() if self._kind.crops else None) or disagreement(self)

    def _attempt(self, test: Callable[[], T]) -> T | str:
        """What `test` finds with the present kind of cache, or how transformers stumbles over it."""
        try:
            return test()
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"{error}" or type(error).__name__
        finally:
            self.release(0)

    def _uncropped(self) -> str | None:
        self._append(Segment(slot=0, token_ids=[0, 1], num_logits=0), with_taps=False)
        is_croppable = self._caches[0].is_croppable
        self.release(0)
        return None if is_croppable else "it has a state that cannot be cropped"

    def _measure_cache(self) -> tuple[int, int]:
        """Bytes of a cache for any sequence, with the copy that a rollback needs, and bytes per token."""
        sizes = []
        for token_ids in ([0] * CONVOLUTION_WIDTH, [0]):
            self.verify([Segment(slot=0, token_ids=token_ids, num_logits=0)], with_taps=False)
            self.rollback(0, 0)
            sizes.append(sum(_num_bytes(layer) for layer in self._caches[0].layers))
        self.release(0)
        growth = sizes[1] - sizes[0]
        return 2 * (sizes[0] - CONVOLUTION_WIDTH * growth), growth


def _num_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors, and of its recurrent state, which is in dicts."""
    values = [v for value in vars(layer).values() for v in (value.values() if isinstance(value, dict) else (value,))]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
