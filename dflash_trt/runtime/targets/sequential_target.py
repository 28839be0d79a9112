# SPDX-License-Identifier: Apache-2.0
"""A target that runs one request after the other on transformers' own caches, and is tested before its first request.

The test compares decoding with uncached passes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Verified

BLOCK_SIZE = 5
REJECTED = (4, 4, 2, 2, 0, 0)
"""Tokens of each block that are taken back: all drafts, some and none, each twice in a row."""
SECONDS = 1.0
SIZE_NAMES = ("window", "chunk", "conv", "compress", "pool")
"""Parts of the configuration's keys that say where a cache begins to forget, pack or pad."""
LONGEST_ON_RANKS = 64
"""Sharded targets are not timed: all ranks must compute the same passes."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of a row, as a part of the largest value."""
ROUNDING = 0.1
"""In other dtypes: more than this, in half of the rows, is no rounding."""


def disagreement(target: HuggingFaceTarget) -> str | None:
    """Says where rolled back sequences and whole ones differ, in logits or taps; None where they agree.

    Sequences of one token, and around each size of the configuration as far as a second allows; slot 0 is empty before
    and after.
    """
    begin, spent = time.perf_counter(), 0.0
    previous = 0
    for length in probe_lengths(target.model.config):
        expected_cost = spent / max(1, previous) * length if previous else 0.0
        is_ranked = dist.is_available() and dist.is_initialized()
        if length > LONGEST_ON_RANKS if is_ranked else time.perf_counter() - begin + expected_cost > SECONDS:
            break
        started = time.perf_counter()
        if (fault := _fault_at(target, length)) is not None:
            return fault
        spent, previous = time.perf_counter() - started, length
    return None


def fails_blocks_only(target: HuggingFaceTarget) -> bool:
    """Whether logits after several tokens a pass are wrong, though none is taken back, and after one a pass right."""
    faults = [_fault_at(target, 1, size, (0,) * 4, with_taps=False) for size in (1, BLOCK_SIZE)]
    return faults[0] is None and faults[1] is not None


def probe_lengths(config: Any) -> list[int]:
    """Lengths of prompts: one token, and just below and above each size, from where the blocks grow across it."""
    sizes = {size for size in _sizes(config.get_text_config().to_dict()) if size > 1}
    return sorted({1} | {max(1, size + offset) for size in sizes for offset in (-3, 1)})


def _sizes(facts: dict[str, Any]) -> Iterator[int]:
    for key, value in facts.items():
        if isinstance(value, dict):
            named = any(part in key for part in SIZE_NAMES)
            yield from (v for v in value.values() if type(v) is int and named)
            yield from _sizes(value)
        elif type(value) is int and any(part in key for part in SIZE_NAMES) and "layers" not in key:
            yield value


@torch.inference_mode()
def _fault_at(
    target: HuggingFaceTarget,
    length: int,
    block_size: int = BLOCK_SIZE,
    all_rejected: Sequence[int] = REJECTED,
    *,
    with_taps: bool = True,
) -> str | None:
    """The error in a sequence whose prompt has `length` tokens, and the token at which it occurs."""
    rng = np.random.default_rng(length)
    tokens = [token for token in range(min(target.vocab_size, 2**16)) if token not in _special(target.model.config)]
    sequence = rng.choice(tokens, length).tolist()
    rows = [_append(target, sequence, 0)]
    for rejected in all_rejected:
        block = rng.choice(tokens, block_size).tolist()
        rows.append(_append(target, block, rejected))
        sequence += block[: block_size - rejected]
    target.release(0)
    logits, taps = (torch.cat(parts) for parts in zip(*rows, strict=True))
    expected_logits, expected_taps = whole_pass(target, sequence)
    wide = len(target.target_layer_ids) * target.tap_hidden_size
    if with_taps and taps.shape[-1] != wide:
        return f"expected taps of {wide} values from its config.json, found {taps.shape[-1]}"
    return _difference("logits", logits, expected_logits, length) or (
        _difference("taps", taps, expected_taps, length) if with_taps else None
    )


def _difference(name: str, found: Tensor, expected: Tensor, length: int) -> str | None:
    """The first row in which `found` [R, W] is not `expected`; None where all are."""
    if found.shape != expected.shape:
        return f"expected {name} of shape {list(expected.shape)}, found {list(found.shape)}"
    errors = (found - expected).abs().amax(-1) / expected.abs().max()
    is_wrong = ~(errors <= TOLERANCES.get(expected.dtype, ROUNDING))
    if expected.dtype not in TOLERANCES and is_wrong.float().mean() < 0.5:  # a router's near tie, which rounding turns
        is_wrong &= ~errors.isfinite()
    if not is_wrong.any():
        return None
    row = int(is_wrong.nonzero()[0])
    return (
        f"{name} of token {row + 1} differ by {float(errors[row]):.2g} of the largest from an uncached pass, after a"
        f" prompt of {length}"
    )


def _append(target: HuggingFaceTarget, token_ids: Sequence[int], rejected: int) -> tuple[Tensor, Tensor]:
    """Logits and taps of the tokens that stay."""
    kept = len(token_ids) - rejected
    segment = Segment(slot=0, token_ids=list(token_ids), num_logits=len(token_ids))
    verified = target.verify([segment], with_taps=True)
    rows = verified.logits[:kept].clone(), verified.taps[:kept].clone()
    target.rollback(0, rejected)
    return rows


def _special(config: Any) -> set[int]:
    """Padding, which some embeddings hold as a row of zeros, and what begins or ends a text."""
    text = config.get_text_config()
    return {token for key in ("pad", "bos", "eos") if type(token := getattr(text, f"{key}_token_id", None)) is int}


def whole_pass(target: HuggingFaceTarget, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [R, V] and taps [R, A*W] of an uncached pass, the taps as the layers themselves return them."""
    model = target.model
    caught: dict[int, Tensor] = {}
    handles = []
    layers: Any = getattr(model.get_decoder(), "layers", None)
    for index in {*target.target_layer_ids} if layers is not None else ():

        def catch(_: Any, __: Any, output: Any, index: int = index) -> None:
            caught[index] = output[0] if isinstance(output, tuple) else output

        handles.append(layers[index].register_forward_hook(catch))
    try:
        output = model(
            torch.tensor([list(token_ids)], device=model.device), use_cache=False, output_hidden_states=not caught
        )
    finally:
        for handle in handles:
            handle.remove()
    num_layers = model.config.get_text_config().num_hidden_layers
    if not caught and len(output.hidden_states) != num_layers + 1:  # layers that are computed again and again
        raise ValueError(f"taps: expected the outputs of {num_layers} layers, found {len(output.hidden_states) - 1}")
    taps = [caught[i] if caught else output.hidden_states[i + 1] for i in target.target_layer_ids]
    wide = [_streams(tap[0], target.tap_hidden_size) for tap in taps]
    device = output.logits.device
    return output.logits[0], torch.cat([tap.to(device) for tap in wide], dim=-1)


def _streams(rows: Tensor, width: int) -> Tensor:
    """rows [R, W], or [R, streams, H] -> [R, width]: the streams side by side, or their mean."""
    if rows.dim() == 2:
        return rows
    streams = rows.unbind(1)
    return torch.cat(streams, dim=-1) if width != rows.shape[-1] else torch.stack(streams).sum(0) / len(streams)


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
        is_copied = not self._kind.crops and num_tokens > 1  # nothing of a single token is rolled back
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
        """Result of `test` with the current kind of cache, or transformers' error."""
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


class BorrowedTarget(SequentialTarget):
    """A target whose model belongs to the caller."""

    def close(self) -> None:
        """Frees the caches and leaves the model as it was."""
        self._caches.clear()


def _num_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors, and of its recurrent state, which is in dicts."""
    values = [v for value in vars(layer).values() for v in (value.values() if isinstance(value, dict) else (value,))]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
