# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU by batch and context, and the batch at which they end."""

from __future__ import annotations

import msgspec

from dflash_trt.deploy.memory import ACTIVATION_RESERVE_BYTES, RUNTIME_OVERHEAD_BYTES
from dflash_trt.estimate.shapes import DraftShape, Method, System

MAX_BATCH = 4096


class MemoryItem(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    bytes: int


class BatchLimit(msgspec.Struct, frozen=True):
    """The largest batch of a method, and what stops a larger one."""

    batch: int
    reason: str


def memory_items(system: System, method: Method, batch: int, tokens: int) -> tuple[MemoryItem, ...]:
    """What one GPU holds with `batch` requests of `tokens` tokens each."""
    target, ranks = system.target, system.tensor_parallel
    draft = system.drafter(method)
    heads = -(-target.num_key_value_heads // ranks)
    row = 2 * heads * target.head_dim * system.kv_bytes
    windowed = (target.num_layers - target.num_full_layers) * min(tokens, target.sliding_window)
    cache = batch * row * (target.num_full_layers * tokens + windowed)
    items = [
        MemoryItem("target weights", round(target.weight_bytes / ranks)),
        MemoryItem("target KV cache", cache),
        MemoryItem("runtime", RUNTIME_OVERHEAD_BYTES),
        MemoryItem("activations", ACTIVATION_RESERVE_BYTES),
    ]
    if draft is not None:
        items += _drafter_items(system, draft, batch, tokens)
    return tuple(items)


def _drafter_items(system: System, draft: DraftShape, batch: int, tokens: int) -> list[MemoryItem]:
    ranks = system.drafter_ranks
    layers = draft.num_layers * draft.layer_params * draft.layer_bits / 8 / ranks
    own_head = draft.head_rows * draft.hidden_size * 2
    weights = layers + draft.fc_params * draft.fc_bits / 8 + own_head
    heads = -(-draft.num_key_value_heads // ranks)
    row = draft.num_layers * 2 * heads * draft.head_dim * system.kv_bytes
    is_dense = system.is_arena_dense and not draft.is_chain
    slots, length = (batch + 1, system.max_seq_len + draft.max_draft_tokens + 1) if is_dense else (batch, tokens)
    captured = 2 * system.max_num_tokens * draft.num_taps * draft.hidden_size
    return [
        MemoryItem("drafter weights", round(weights)),
        MemoryItem("drafter context" + (" (dense arena)" if is_dense else ""), slots * length * row),
        MemoryItem("captured hidden states", captured),
    ]


def batch_limit(system: System, method: Method, tokens: int, draft_tokens: int = 0) -> BatchLimit:
    """The largest batch whose requests hold `tokens` tokens each; 0 where not even one fits.

    A cache pool takes `pool_fraction` of what the rest leaves, as TensorRT-LLM's does.
    """

    def fits(batch: int) -> bool:
        items = memory_items(system, method, batch, tokens)
        pooled = {"target KV cache"} | (set() if system.is_arena_dense else {"drafter context"})
        pool = sum(item.bytes for item in items if item.name in pooled)
        fixed = sum(item.bytes for item in items) - pool
        return pool <= (system.gpu_memory_bytes - fixed) * system.pool_fraction

    by_tokens = system.max_num_tokens // (draft_tokens + 1)
    low, high = 0, min(MAX_BATCH, by_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if low == by_tokens:
        return BatchLimit(low, f"max_num_tokens {system.max_num_tokens}: each request verifies {draft_tokens + 1}")
    if low == MAX_BATCH:
        return BatchLimit(low, "no bound found: the search ends here")
    what = "caches of requests" if low else "weights alone"
    return BatchLimit(low, f"memory: {what} of {tokens} tokens fill {system.gpu}")
