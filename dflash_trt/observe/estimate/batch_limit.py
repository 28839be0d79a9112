# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU by batch and context, and the batch at which they end: the items of deploy's memory."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from dflash_trt.deploy import memory
from dflash_trt.observe.estimate.shapes import DraftShape, Method, System

CACHES = "caches of requests"
MAX_BATCH = 4096


class MemoryItem(msgspec.Struct, frozen=True):
    name: str
    bytes: int


class BatchLimit(msgspec.Struct, frozen=True):
    """The largest batch of a method, and what stops a larger one."""

    batch: int
    reason: str


def memory_items(system: System, method: Method, batch: int, tokens: int) -> tuple[MemoryItem, ...]:
    """What one GPU holds with `batch` requests of `tokens` tokens each, for as long as it serves."""
    load = _load(system, method, batch)
    items = [MemoryItem(item.name, item.bytes) for item in memory.memory_items(load)[0] if not item.is_late]
    return (*items, *_eagle3_items(system, method), MemoryItem(CACHES, _pool_bytes(system, method, load, tokens)))


def _load(system: System, method: Method, batch: int) -> memory.ServingLoad:
    load = system.memory
    assert load is not None, "this system was made to ask for speed only"
    gpu = msgspec.structs.replace(load.gpus.gpu, memory_bytes=system.gpu_memory_bytes)
    return msgspec.structs.replace(
        load,
        gpus=msgspec.structs.replace(load.gpus, gpu=gpu),
        draft=load.draft if method == "dflash" else None,
        ranks=system.tensor_parallel,
        num_ranks=system.drafter_ranks,
        max_batch_size=-(-batch // system.replicas),
        max_num_tokens=system.max_num_tokens,
    )


def _pool_bytes(system: System, method: Method, load: memory.ServingLoad, tokens: int) -> int:
    """Of the pool that `load`'s requests fill when each has `tokens` tokens."""
    request = memory.request_bytes(msgspec.structs.replace(load, max_seq_len=tokens))
    assert request is not None, "a shape knows its cache"
    if method == "eagle3" and (draft := system.eagle3) is not None:
        heads = -(-draft.num_key_value_heads // system.ranks_of_drafter(method))
        request += tokens * draft.num_layers * 2 * heads * draft.head_dim * system.kv_bytes
    return load.max_batch_size * request


def _eagle3_items(system: System, method: Method) -> list[MemoryItem]:
    """EAGLE-3's shape is assumed, and so is no draft that memory could be told of."""
    if method != "eagle3" or system.eagle3 is None:
        return []
    draft: DraftShape = system.eagle3
    (fc,), (layer,) = draft.gemms["tap projection"], draft.gemms["layers"]
    weights = 2 * (layer.params / system.ranks_of_drafter(method) + fc.params + draft.head_rows * draft.hidden_size)
    captured = 2 * system.max_num_tokens * draft.num_taps * draft.hidden_size
    return [MemoryItem("drafter weights", round(weights)), MemoryItem("captured hidden states", captured)]


def batch_limit(system: System, method: Method, tokens: int, draft_tokens: int = 0) -> BatchLimit:
    """The largest batch whose requests hold `tokens` tokens each; 0 where not even one fits.

    A cache pool takes `pool_fraction` of what the rest leaves, as TensorRT-LLM's does, or less, where what is allocated
    after it needs more.
    """

    def fits(batch: int) -> bool:
        load = _load(system, method, batch)
        late = sum(item.bytes for item in memory.memory_items(load)[0] if item.is_late)
        fixed = sum(item.bytes for item in memory_items(system, method, batch, tokens) if item.name != CACHES)
        free = system.gpu_memory_bytes - fixed
        return _pool_bytes(system, method, load, tokens) <= min(int(free * load.pool_fraction), free - late)

    by_tokens = system.max_num_tokens // (draft_tokens + 1) * system.replicas
    batch = bisect_left(range(1, min(MAX_BATCH, by_tokens) + 1), True, key=lambda batch: not fits(batch))
    if batch == by_tokens:
        return BatchLimit(batch, f"max_num_tokens {system.max_num_tokens}: each request verifies {draft_tokens + 1}")
    if batch == MAX_BATCH:
        return BatchLimit(batch, "no bound found: the search ends here")
    what = "caches of requests" if batch else "weights alone"
    return BatchLimit(batch, f"memory: {what} of {tokens} tokens fill {system.gpu}")
