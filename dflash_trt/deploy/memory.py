# SPDX-License-Identifier: Apache-2.0
"""Bytes on one GPU of a deployment: weights, context arena, workspace, and the cache pool that is left.

Estimates from sizes, not measurements. What TensorRT-LLM sets aside follows its own check before start
(`_torch/speculative/dflash.py`; its test test_dflash_config_budget.py states the formulas).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.sizes import DraftSizes, TargetSizes
from dflash_trt.engine.plans.profiles import graph_batch_sizes
from dflash_trt.engine.signatures import TOKENS_PER_PAGE

GIB = 2**30
RUNTIME_OVERHEAD_BYTES = 4 * GIB
ACTIVATION_RESERVE_BYTES = 6 * GIB
MAX_BATCH, MAX_TOKENS = 2**16, 2**24  # bounds of the search for what fits: beyond them memory is no bound


class ServingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment's load on each GPU."""

    gpus: Gpus
    draft: DraftSizes | None
    """None: plain decoding."""
    target: TargetSizes | None
    algorithms: dict[str, str]
    ranks: int
    """Tensor-parallel ranks of the target."""
    attention_dp: bool = False
    """Whether each rank has whole attention layers and requests of its own; then experts alone are divided."""
    num_ranks: int
    """Ranks that share one drafter: all of them natively, in engine mode those it was built for."""
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_draft_tokens: int
    is_dense: bool
    """Whether the context arena is set aside for every request at full length; paged pools grow as needed."""
    is_fp8_cache: bool
    """Whether the target's cached K and V are FP8; BF16 otherwise."""
    is_fp8_context: bool = False
    """Whether the drafter's cached K and V are FP8; never in TensorRT-LLM, whose worker caches in fc's dtype."""
    pool_fraction: float
    captures_by_graph: bool = False
    """Whether taps are captured in a buffer for each CUDA graph, as by TensorRT-LLM up to its worker of 414ba69f."""
    separate_draft_manager: bool = False
    """Whether a manager of the drafter's rows shares the pool beside a dense arena, which is allocated anew when that
    manager is: TensorRT-LLM before pull request 19410."""
    workspace_bytes: int = 0
    """Scratch of the drafter's TensorRT plans; none natively."""


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


def arena_bytes(load: ServingLoad) -> int:
    """The dense context arena: one slot a request and one for padding, each as long as the longest request."""
    rows = load.max_seq_len + load.num_draft_tokens + 1
    return (load.max_batch_size + 1) * rows * _context_row_bytes(load)


def paged_arena_bytes(load: ServingLoad) -> int:
    """The private arena of TensorRT-LLM's paged layout: slots rounded up to whole pages."""
    pages = -(-(load.max_seq_len + load.num_draft_tokens + 1) // TOKENS_PER_PAGE)
    return (load.max_batch_size + 1) * pages * TOKENS_PER_PAGE * _context_row_bytes(load)


def drafter_in_words(load: ServingLoad) -> str:
    """GPU memory of the drafter's context in either layout, and of its weights whole and shared."""
    assert load.draft is not None, "plain decoding has no context rows"
    longest = load.max_seq_len * _context_row_bytes(load) / GIB
    text = (
        f"the drafter's context on each GPU: {longest:.2f} GiB for a request of {load.max_seq_len} tokens, in pages of"
        f" the pool (TRTLLM); {arena_bytes(load) / GIB:.1f} GiB reserved for {load.max_batch_size} of them in a dense"
        " arena (VANILLA)"
    )
    if load.ranks == 1 or load.attention_dp:
        return text
    weights = [
        f"{load.draft.weight_bytes(load.algorithms, ranks) / GIB:.2f} GiB {place}"
        + (" (as deployed)" if ranks == load.num_ranks else "")
        for ranks, place in ((1, "whole"), (load.ranks, f"shared by {load.ranks} GPUs"))
    ]
    return f"{text}\nthe drafter's weights on each GPU: {'; '.join(weights)}"


def gpu_memory(load: ServingLoad) -> GpuMemory:
    """Account for `load`, and find the largest batch and context that fit."""
    items, unknown = memory_items(load)
    free = _free(load, items)
    pool = max(0, int(free * load.pool_fraction))
    late = sum(item.bytes for item in items if item.is_late)
    request = request_bytes(load)
    return GpuMemory(
        capacity_bytes=load.gpus.gpu.memory_bytes,
        items=items,
        unknown=unknown,
        free_bytes=free,
        pool_bytes=pool,
        request_bytes=request,
        full_requests=None if request is None else pool // request,
        largest_fraction=max(0.0, 1 - late / free) if free > 0 else 0.0,
        fits=_fits(load),
        is_estimate=not _fits(load) and _fits(load, spared=ACTIVATION_RESERVE_BYTES),
        largest_batch=_largest(lambda n: _fits(msgspec.structs.replace(load, max_batch_size=n)), MAX_BATCH),
        largest_context=_largest(lambda n: _fits(msgspec.structs.replace(load, max_seq_len=n)), MAX_TOKENS),
    )


def memory_items(load: ServingLoad) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Allocations beside the cache pool, and those of unknown size."""
    target = load.target
    unknown = []
    items = []
    if target is None:
        unknown.append("target weights and cache: no local checkpoint, and its size is not published")
    else:
        shared = f"1/{load.ranks} of {'the experts' if load.attention_dp else 'all'}, {target.origin}"
        items.append(Item("target weights", target.weight_bytes(load.ranks, attention_dp=load.attention_dp), shared))
        if target.cache is None:
            unknown.append("target cache: what its layers keep is of no known size")
    if load.draft is not None:
        items += _drafter(load, load.draft)
        items += _captured(load, load.draft)
    items.append(Item("runtime", RUNTIME_OVERHEAD_BYTES, "CUDA context, libraries, communication"))
    items.append(Item("activations", ACTIVATION_RESERVE_BYTES, "reserve, the target's workspaces included"))
    if load.draft is not None and load.workspace_bytes:
        items.append(Item("drafter workspace", load.workspace_bytes, "what both plans may take at most by default"))
    return tuple(items), tuple(unknown)


def _drafter(load: ServingLoad, draft: DraftSizes) -> list[Item]:
    shared = f"layers 1/{load.num_ranks}, fc whole" if load.num_ranks > 1 else "whole on every GPU"
    items = [Item("drafter weights", draft.weight_bytes(load.algorithms, load.num_ranks), shared)]
    if load.is_dense:
        slots = f"{load.max_batch_size} + 1 slots of {load.max_seq_len} + {load.num_draft_tokens + 1} tokens"
        items.append(Item("context arena", arena_bytes(load), slots))
        if load.separate_draft_manager:
            replaced = "beside the pool, once: the old V while the arena is allocated anew"
            items.append(Item("arena replaced", arena_bytes(load) // 2, replaced, is_late=True))
    return items


def _captured(load: ServingLoad, draft: DraftSizes) -> list[Item]:
    spec = draft.spec
    size = 2 * load.max_num_tokens * spec.target_hidden_size
    how = f"{load.max_num_tokens} tokens, {len(spec.target_layer_ids)} taps, BF16"
    items = [Item("captured hidden states", size, how)]
    if load.captures_by_graph:
        graphs = len(graph_batch_sizes(load.max_batch_size))
        items.append(
            Item("captured by graphs", graphs * size, f"beside the pool: {graphs} times the same", is_late=True)
        )
    return items


def request_bytes(load: ServingLoad) -> int | None:
    """Pool bytes of one request of max_seq_len tokens; None where the target's are not known."""
    if load.target is None or load.target.cache is None:
        return None
    ranks = 1 if load.attention_dp else load.ranks
    cache = load.target.cache.bytes(load.max_seq_len, fp8=load.is_fp8_cache, num_ranks=ranks)
    rows = 0
    if load.draft is not None and (load.separate_draft_manager or not load.is_dense):
        ranks = ranks if load.is_dense else load.num_ranks
        rows = load.draft.spec.context_bytes_per_token(fp8=load.is_fp8_context, num_ranks=ranks)
    return cache + load.max_seq_len * rows


def _context_row_bytes(load: ServingLoad) -> int:
    assert load.draft is not None, "plain decoding has no context rows"
    return load.draft.spec.context_bytes_per_token(fp8=load.is_fp8_context, num_ranks=load.num_ranks)


def _free(load: ServingLoad, items: tuple[Item, ...]) -> int:
    return load.gpus.gpu.memory_bytes - sum(item.bytes for item in items if not item.is_late)


def _fits(load: ServingLoad, spared: int = 0) -> bool:
    items, _ = memory_items(load)
    free = _free(load, items) + spared
    return free >= 0 and int(free * load.pool_fraction) >= (request_bytes(load) or 0)


def _largest(fits: Callable[[int], bool], bound: int) -> int:
    """The largest number from 1 to `bound` that fits; what fits a number fits every smaller one."""
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
