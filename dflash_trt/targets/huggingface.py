# SPDX-License-Identifier: Apache-2.0
"""The target on Hugging Face transformers: any causal language model that returns hidden states.

Models of plain full and sliding-window attention run as one packed pass over all requests (`PackedTarget`); others,
with recurrent state for instance, run one request after the other with transformers' own caches (`SequentialTarget`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, __version__

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights, read_headers
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError
from dflash_trt.targets.free_memory import check_memory
from dflash_trt.targets.quiet import quiet_transformers
from dflash_trt.targets.refusal import check_architecture, refusing
from dflash_trt.targets.slot_attention import IMPLEMENTATION, Pass, SlotCache
from dflash_trt.targets.target import Segment, Verified

PACKED_MODEL_TYPES = {
    *("deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama"),
    *("mistral", "mixtral", "olmo3", "qwen2", "qwen3", "qwen3_moe"),
}
"""tests/targets compares each with transformers' own attention. A list, because a model does not tell all that its
attention needs: diffllama's second softmax, or doge's mask, would be left out without a word."""
GENERATION_CONFIG = "generation_config.json"
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""One longer request in a pass would turn the positions of all the others."""


def load_model(
    directory: Path, spec: TargetSpec, target_layer_ids: Sequence[int], *, num_ranks: int = 1, **load_options: Any
) -> PreTrainedModel:
    """Loads safetensors weights in FLOAT; code that a checkpoint brings along is never run.

    FLOAT although checkpoints are BF16: verifying a block and decoding token by token sum in different order,
    and in BF16 the rounding of that is large enough to flip a greedy choice.

    Raises CheckpointError for a tap on the last layer, which transformers returns after the final norm, and for what
    transformers would put something of its own in the place of: missing weights, a damaged generation_config.json; and
    where there is no room for the share of one of `num_ranks` ranks. Only then are weights of a repository fetched.
    """
    if spec.num_hidden_layers - 1 in target_layer_ids:
        raise CheckpointError(
            f"target_layer_ids: expected layers below {spec.num_hidden_layers - 1}, found the last"
            " layer, whose output transformers returns only after the final norm"
        )
    if (directory / GENERATION_CONFIG).is_file():
        Facts.load(directory / GENERATION_CONFIG)
    headers = read_headers(directory)
    check_memory(directory, read_weights(directory) if headers is None else headers, num_ranks)
    fetch_weights(directory)
    options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # to refuse them in our words
    check_architecture(directory)
    model: PreTrainedModel
    with refusing(directory, f"a causal language model that transformers {__version__} loads"), quiet_transformers():
        model, loaded = AutoModelForCausalLM.from_pretrained(directory, **(options | load_options))
    _check_weights(directory, loaded)
    return model.eval()


def _check_weights(directory: Path, loaded: dict[str, Any]) -> None:
    """`loaded` is what transformers (5.23) says of the tensors; those that it did not find or take are random."""
    hint = "download or copy the checkpoint again"
    if missing := sorted(loaded["missing_keys"]):
        raise CheckpointError(f"{directory}: expected a tensor for {missing[0]}, found none", hint=hint)
    if mismatched := sorted(loaded["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise CheckpointError(
            f"{directory}: {name}: expected shape {list(expected)} (config.json), found {list(found)}", hint=hint
        )


def make_target(model: PreTrainedModel, target_layer_ids: Sequence[int], num_slots: int) -> HuggingFaceTarget:
    """The fastest target that runs `model` for `num_slots` sequences and returns the taps `target_layer_ids`."""
    return (PackedTarget if can_pack(model) else SequentialTarget)(model, target_layer_ids, num_slots)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether `slot_attention` is known to do all that the model's own attention does."""
    ropes = getattr(model.config, "rope_parameters", None) or {}  # one, or one for each type of layer
    rope_types = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    return model.config.model_type in PACKED_MODEL_TYPES and not rope_types & LENGTH_DEPENDENT_ROPE


def stop_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end-of-sequence tokens of generation_config.json (config.json where there is none).

    Raises CheckpointError for anything but token ids.
    """
    given = model.generation_config.eos_token_id
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"{GENERATION_CONFIG}: eos_token_id: expected a token id or a list of them, found {given!r}"
        )
    return frozenset(ids)


class HuggingFaceTarget:
    """What both ways to run a model share: embeddings, lm_head and taps."""

    cache_bytes_per_token: int

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        self.model = model
        self._embedding = model.get_input_embeddings()
        self._lm_head = model.get_output_embeddings()
        # hidden_states[0] are the embeddings: decoder layer i's output stands at i + 1 (trap 1).
        self._taps = [layer + 1 for layer in target_layer_ids]

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """One pass over the segments."""
        raise NotImplementedError

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Takes tokens of the slot's last segment back."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Empties a slot."""
        raise NotImplementedError

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [..., H]."""
        embeddings: torch.Tensor = self._embedding(token_ids.to(self.model.device))
        return embeddings

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lm_head's logits [..., V]."""
        logits: torch.Tensor = self._lm_head(hidden)
        return logits

    def head(self) -> dict[str, torch.Tensor]:
        """The lm_head's tensors: `lm_head` [V, H], and `lm_head_bias` [V] where it has one.

        Raises CheckpointError for a head that is more than a matrix.
        """
        if type(self._lm_head) is not torch.nn.Linear:
            raise CheckpointError(
                f"{self.model.name_or_path}: expected an lm_head that is a linear layer, found"
                f" {type(self._lm_head).__name__}"
            )
        bias = {} if self._lm_head.bias is None else {"lm_head_bias": self._lm_head.bias.detach()}
        return {"lm_head": self._lm_head.weight.detach(), **bias}

    def _forward(
        self, token_ids: Sequence[int], logits_rows: Sequence[int], *, with_taps: bool, **inputs: Any
    ) -> Verified:
        """One forward call over `token_ids`, logits behind the rows `logits_rows`."""
        output = self.model(
            torch.tensor([token_ids], device=self.model.device),
            output_hidden_states=with_taps,
            logits_to_keep=torch.tensor(logits_rows, dtype=torch.int64, device=self.model.device),
            **inputs,
        )
        if not with_taps:
            return Verified(logits=output.logits[0], taps=torch.empty(len(token_ids), 0))
        taps = [output.hidden_states[tap][0] for tap in self._taps]
        return Verified(logits=output.logits[0], taps=torch.cat(taps, dim=-1))


class PackedTarget(HuggingFaceTarget):
    """All segments in one forward call, their rows end to end."""

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int], num_slots: int) -> None:
        """Replaces the model's attention: the model serves nobody else from here on.

        Raises CheckpointError for a model that its configuration keeps from computing a token.
        """
        super().__init__(model, target_layer_ids)
        model.set_attn_implementation(IMPLEMENTATION)
        self._cache = SlotCache(num_slots, model.device)
        self._lengths = [0] * num_slots
        with refusing(model.name_or_path, "a model that computes a token"):
            self.verify([Segment(slot=0, token_ids=[0], num_logits=0)], with_taps=False)
        self.release(0)
        self.cache_bytes_per_token = self._cache.bytes_per_token

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends all segments in one forward call."""
        current = Pass(segments, [self._lengths[segment.slot] for segment in segments], self.model.device)
        token_ids: list[int] = []
        logits_rows: list[int] = []
        for segment in segments:
            token_ids += segment.token_ids
            logits_rows += range(len(token_ids) - segment.num_logits, len(token_ids))
        verified = self._forward(
            token_ids,
            logits_rows,
            with_taps=with_taps,
            position_ids=current.positions[None],
            use_cache=False,
            slot_cache=self._cache,
            slot_pass=current,
        )
        for segment in segments:
            self._lengths[segment.slot] += len(segment.token_ids)
        return verified

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Shortens the sequence; the rows behind it are overwritten by the next segment."""
        self._lengths[slot] -= num_tokens

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._lengths[slot] = 0
        self._cache.clear(slot)


class SequentialTarget(HuggingFaceTarget):
    """One forward call a segment, on one of transformers' own caches a slot."""

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int], num_slots: int) -> None:
        """Raises CheckpointError for a model whose tokens cannot be taken back."""
        super().__init__(model, target_layer_ids)
        self._caches: list[DynamicCache | None] = [None] * num_slots
        self._last: list[tuple[DynamicCache | None, Sequence[int]]] = [(None, ())] * num_slots
        """A slot's last segment, and its cache before it where that cannot be cropped."""
        self._check_rollback()
        self.cache_bytes_per_token = self._measure_cache()

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends the segments one after the other."""
        parts = [self._append(segment, with_taps=with_taps) for segment in segments]
        return Verified(
            logits=torch.cat([part.logits for part in parts]), taps=torch.cat([part.taps for part in parts])
        )

    @torch.inference_mode()
    def rollback(self, slot: int, num_tokens: int) -> None:
        """Crops the cache; with 0 it still trims sliding windows back to their size.

        Recurrent state cannot be cropped (transformers 5.23 crops around it and says nothing): it is computed again
        from what was before the segment.
        """
        cache, (before, token_ids) = self._caches[slot], self._last[slot]
        assert cache is not None, f"slot {slot} is empty"
        if before is not None and num_tokens > 0:
            self._caches[slot] = before
            kept = token_ids[: len(token_ids) - num_tokens]
            self._append(Segment(slot=slot, token_ids=kept, num_logits=0), with_taps=False)
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
        found = self._logits_after([1, 0])
        self.release(0)
        return bool((found - expected).abs().max() > 1e-3 * expected.abs().max())

    def _logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.verify([Segment(slot=0, token_ids=token_ids, num_logits=1)], with_taps=False).logits

    def _measure_cache(self) -> int:
        """What a second token adds to a cache; state of fixed size is not counted."""
        sizes = []
        for _ in range(2):
            self.verify([Segment(slot=0, token_ids=[0], num_logits=0)], with_taps=False)
            cache = self._caches[0]
            assert cache is not None
            sizes.append(sum(_num_bytes(layer) for layer in cache.layers))
        self.release(0)
        return sizes[1] - sizes[0]


def _num_bytes(layer: Any) -> int:
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
