# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU of a deployment: weights, context arena, workspace, and the cache pool that is left.

Estimates from sizes, not measurements. The memory that TensorRT-LLM sets aside follows its own check before start
(`_torch/speculative/dflash.py`; its test test_dflash_config_budget.py has the formulas).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import msgspec

from dflash_trt.deploy.gpus import Gpus, counts
from dflash_trt.deploy.resolved_deployment import ServingLoad
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.engine.plans.plan import DEFAULT_WORKSPACE_BYTES, graph_batch_sizes, num_workspaces
from dflash_trt.engine.signatures import TOKENS_PER_PAGE

GIB = 2**30
RUNTIME_OVERHEAD_BYTES = 4 * GIB
ACTIVATION_RESERVE_BYTES = 6 * GIB
POOL_FRACTION = 0.9  # vLLM and SGLang take a share of the whole GPU for everything together; a tenth stays free
MAX_BATCH, MAX_TOKENS = 2**16, 2**24  # bounds of the search for what fits: beyond them memory is no bound


def is_dense(load: ServingLoad, schema: Schema) -> bool:
    """Whether the context arena is set aside for every request at full length; paged pools grow as needed."""
    return schema.runtime == "trtllm" and load.draft_attention != "TRTLLM"


def is_fp8_context(load: ServingLoad, schema: Schema) -> bool:
    """Whether the drafter's cached K and V are FP8; never in TensorRT-LLM, whose worker caches in fc's dtype."""
    return load.kv_cache_dtype == "fp8" and schema.runtime != "trtllm"


def pool_fraction(load: ServingLoad, schema: Schema) -> float:
    """Share of the free memory that the cache pool takes."""
    return load.kv_cache_fraction if schema.runtime == "trtllm" else POOL_FRACTION


def worker_buffer(schema: Schema, name: Literal["captures_by_graph", "separate_draft_manager"]) -> bool:
    """Whether the release's DFlash worker has a buffer; always False for a runtime without that worker.

    captures_by_graph: hidden states are captured in a buffer for each CUDA graph, as by TensorRT-LLM up to its worker
    of 414ba69f. separate_draft_manager: a manager of the drafter's rows shares the pool beside a dense arena, which is
    allocated anew when that manager is, as by TensorRT-LLM before pull request 19410.
    """
    return bool(schema.rules.get("worker_buffers", {}).get(name, False))


class Item(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    bytes: int
    how: str
    is_late: bool = False
    """Whether it is allocated after the pool, and must fit beside it."""


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory account of one GPU."""

    capacity_bytes: int
    items: tuple[Item, ...]
    unknown: tuple[str, ...]
    """Allocations of unknown size, which are not counted."""
    free_bytes: int
    """Memory left after the items allocated before the pool; negative where they do not fit."""
    pool_bytes: int
    request_bytes: int | None
    """Pool bytes of one request at full length, its context rows included."""
    full_requests: int | None
    """Requests at full length that the pool holds."""
    largest_fraction: float
    """Largest pool, as a fraction of free memory, that leaves room for later allocations; 0 if none does."""
    fits: bool
    """Whether everything known fits and the pool holds at least one request at full length."""
    is_estimate: bool
    """Whether it is the reserve for activations, which is no measurement, without which it would fit."""
    largest_batch: int
    """Largest batch that fits with the deployment's max_seq_len; 0 if none does."""
    largest_context: int
    """Longest context that fits with the deployment's max_batch_size; 0 if none does."""


def arena_bytes(load: ServingLoad, schema: Schema) -> int:
    """The dense context arena: one slot a request and one for padding, each as long as the longest request."""
    rows = load.max_seq_len + load.num_draft_tokens + 1
    return (load.max_batch_size + 1) * rows * _context_row_bytes(load, schema)


def paged_arena_bytes(load: ServingLoad, schema: Schema) -> int:
    """The private arena of TensorRT-LLM's paged layout: slots rounded up to whole pages."""
    pages = -(-(load.max_seq_len + load.num_draft_tokens + 1) // TOKENS_PER_PAGE)
    return (load.max_batch_size + 1) * pages * TOKENS_PER_PAGE * _context_row_bytes(load, schema)


def drafter_in_words(load: ServingLoad, schema: Schema) -> str:
    """GPU memory of the drafter's context in either layout, and of its weights whole and shared."""
    assert load.draft_sizes is not None, "plain decoding has no context rows"
    longest = load.max_seq_len * _context_row_bytes(load, schema) / GIB
    text = (
        f"the drafter's context on each GPU: {longest:.2f} GiB for a request of {load.max_seq_len} tokens, in pages of"
        f" the pool (TRTLLM); {arena_bytes(load, schema) / GIB:.1f} GiB reserved for {load.max_batch_size} of them in a"
        " dense arena (VANILLA)"
    )
    if load.tensor_parallel == 1 or load.enable_attention_dp:
        return text
    weights = [
        f"{load.draft_sizes.weight_bytes(load.algorithms, ranks) / GIB:.2f} GiB {place}"
        + (" (as deployed)" if ranks == load.num_ranks else "")
        for ranks, place in ((1, "whole"), (load.tensor_parallel, f"shared by {load.tensor_parallel} GPUs"))
    ]
    return f"{text}\nthe drafter's weights on each GPU: {'; '.join(weights)}"


def gpu_memory(load: ServingLoad, schema: Schema) -> GpuMemory:
    """Account for `load`, and find the largest batch and context that fit."""
    items, unknown = memory_items(load, schema)
    free = _free(load, items)
    pool = max(0, int(free * pool_fraction(load, schema)))
    late = sum(item.bytes for item in items if item.is_late)
    request = request_bytes(load, schema)
    return GpuMemory(
        capacity_bytes=load.gpus.gpu.memory_bytes,
        items=items,
        unknown=unknown,
        free_bytes=free,
        pool_bytes=pool,
        request_bytes=request,
        full_requests=None if request is None else pool // request,
        largest_fraction=max(0.0, 1 - late / free) if free > 0 else 0.0,
        fits=_fits(load, schema),
        is_estimate=not _fits(load, schema) and _fits(load, schema, spared=ACTIVATION_RESERVE_BYTES),
        largest_batch=_largest(load, schema, "max_batch_size", MAX_BATCH),
        largest_context=_largest(load, schema, "max_seq_len", MAX_TOKENS),
    )


def memory_items(load: ServingLoad, schema: Schema) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Allocations beside the cache pool, and those of unknown size."""
    target = load.target_sizes
    unknown = []
    items = []
    if target is None:
        unknown.append("target weights and cache: no local checkpoint, and its size is not published")
    else:
        shared = f"1/{load.tensor_parallel} of {'the experts' if load.enable_attention_dp else 'all'}, {target.origin}"
        items.append(
            Item(
                "target weights",
                target.weight_bytes(load.tensor_parallel, attention_dp=load.enable_attention_dp),
                shared,
            )
        )
        if target.cache is None:
            unknown.append("target cache: what its layers keep is of no known size")
    if load.draft_sizes is not None:
        items += _drafter(load, schema, load.draft_sizes)
        items += _captured(load, schema, load.draft_sizes)
    items.append(Item("runtime", RUNTIME_OVERHEAD_BYTES, "CUDA context, libraries, communication"))
    items.append(Item("activations", ACTIVATION_RESERVE_BYTES, "reserve, the target's workspaces included"))
    if load.draft_sizes is not None and load.mode == "engine":
        workspaces = num_workspaces(load.draft_sizes.spec) * DEFAULT_WORKSPACE_BYTES
        items.append(Item("drafter workspace", workspaces, "what its plans may take at most by default"))
    return tuple(items), tuple(unknown)


def _drafter(load: ServingLoad, schema: Schema, draft: DraftSizes) -> list[Item]:
    shared = f"layers 1/{load.num_ranks}, fc whole" if load.num_ranks > 1 else "whole on every GPU"
    items = [Item("drafter weights", draft.weight_bytes(load.algorithms, load.num_ranks), shared)]
    if is_dense(load, schema):
        slots = f"{load.max_batch_size} + 1 slots of {load.max_seq_len} + {load.num_draft_tokens + 1} tokens"
        items.append(Item("context arena", arena_bytes(load, schema), slots))
        if worker_buffer(schema, "separate_draft_manager"):
            replaced = "beside the pool, once: the old V while the arena is allocated anew"
            items.append(Item("arena replaced", arena_bytes(load, schema) // 2, replaced, is_late=True))
    return items


def _captured(load: ServingLoad, schema: Schema, draft: DraftSizes) -> list[Item]:
    spec = draft.spec
    size = 2 * load.max_num_tokens * spec.target_hidden_size
    how = f"{load.max_num_tokens} tokens, {len(spec.target_layer_ids)} taps, BF16"
    items = [Item("captured hidden states", size, how)]
    if worker_buffer(schema, "captures_by_graph"):
        graphs = len(graph_batch_sizes(load.max_batch_size))
        items.append(
            Item("captured by graphs", graphs * size, f"beside the pool: {graphs} times the same", is_late=True)
        )
    return items


def request_bytes(load: ServingLoad, schema: Schema) -> int | None:
    """Pool bytes of one request of max_seq_len tokens; None where the target's are not known."""
    if load.target_sizes is None or load.target_sizes.cache is None:
        return None
    ranks = 1 if load.enable_attention_dp else load.tensor_parallel
    cache = load.target_sizes.cache.bytes(load.max_seq_len, fp8=load.kv_cache_dtype == "fp8", num_ranks=ranks)
    rows = 0
    if load.draft_sizes is not None and (worker_buffer(schema, "separate_draft_manager") or not is_dense(load, schema)):
        ranks = ranks if is_dense(load, schema) else load.num_ranks
        rows = load.draft_sizes.spec.context_bytes_per_token(fp8=is_fp8_context(load, schema), num_ranks=ranks)
    return cache + load.max_seq_len * rows


def smallest_gpus(load: ServingLoad, schema: Schema) -> Gpus | None:
    """The fewest GPUs of the load's model on which it fits, tensor-parallel over all; None if no number is enough.

    Smaller numbers than the load's ranks, and those that do not divide the heads of target and draft, are left out.
    """
    heads = [load.target_sizes.num_attention_heads or 0 if load.target_sizes else 0]
    heads += [load.draft_sizes.spec.num_attention_heads] if load.draft_sizes else []
    for count in counts(load.gpus.gpu):
        if count <= load.tensor_parallel or any(each % count for each in heads):
            continue
        gpus = Gpus(load.gpus.gpu, count)
        ranks = 1 if load.enable_attention_dp or (load.mode == "engine" and load.num_ranks == 1) else count
        if _fits(msgspec.structs.replace(load, gpus=gpus, tensor_parallel=count, num_ranks=ranks), schema):
            return gpus
    return None


def _context_row_bytes(load: ServingLoad, schema: Schema) -> int:
    assert load.draft_sizes is not None, "plain decoding has no context rows"
    return load.draft_sizes.spec.context_bytes_per_token(fp8=is_fp8_context(load, schema), num_ranks=load.num_ranks)


def _free(load: ServingLoad, items: tuple[Item, ...]) -> int:
    return load.gpus.gpu.memory_bytes - sum(item.bytes for item in items if not item.is_late)


def _fits(load: ServingLoad, schema: Schema, spared: int = 0) -> bool:
    items, _ = memory_items(load, schema)
    free = _free(load, items) + spared
    return free >= 0 and int(free * pool_fraction(load, schema)) >= (request_bytes(load, schema) or 0)


def _largest(load: ServingLoad, schema: Schema, size: str, bound: int) -> int:
    """The largest `size` from 1 to `bound` that fits, as all smaller ones do; 0 if none does."""
    sizes = range(1, bound + 1)
    return bisect_left(sizes, True, key=lambda n: not _fits(msgspec.structs.replace(load, **{size: n}), schema))
