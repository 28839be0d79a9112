# SPDX-License-Identifier: Apache-2.0
"""Optimisation profiles: one for each batch size of TensorRT-LLM's CUDA graphs, with kernels chosen for its size."""

from __future__ import annotations

from dflash_trt.engine.plans.plan import PlanOptions, Profile, Range, graph_batch_sizes
from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES, Graph

SMALLEST_ROWS = 16  # context rows of a decode step with few requests; below, only launch overhead is left
MOST_PAGES = MAX_CONTEXT // PAGE_SIZES[0]
COARSE_ROWS = 256  # up to here weights are what a GEMM waits for, so that padding to the next power of 4 is free


def profiles(graph: str, options: PlanOptions) -> tuple[Profile, ...]:
    """The profiles of a graph, by rising size; B and T are fixed in each, because shorter calls are padded."""
    if graph == "context":
        return tuple({"T": _fixed(T)} for T in row_buckets(options.max_num_tokens))
    slots = options.max_batch_size + 1  # TensorRT-LLM's context arena has one more, for padding
    table = {"slots": _up_to(slots), "pages": _up_to(MOST_PAGES)}
    return tuple({"B": _fixed(B), **table} for B in graph_batch_sizes(options.max_batch_size))


def row_buckets(largest: int) -> list[int]:
    """16, 64, 256, 512, 1024, ... and the largest."""
    fine = _rising(2 * COARSE_ROWS, 2, largest) if largest > COARSE_ROWS else []
    return [*_rising(SMALLEST_ROWS, 4, min(largest, COARSE_ROWS)), *fine]


def shapes(graph: Graph, profile: Profile) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Minimum, optimum and maximum shape of every input."""
    low, best, high = ({axis: getattr(r, bound) for axis, r in profile.items()} for bound in ("min", "opt", "max"))
    return {port.name: (port.sizes(low), port.sizes(best), port.sizes(high)) for port in graph.inputs}


def _rising(smallest: int, factor: int, largest: int) -> list[int]:
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * factor, largest))
    return sizes


def _fixed(size: int) -> Range:
    return Range(min=size, opt=size, max=size)


def _up_to(size: int) -> Range:
    """Any size of the page table. Only the plugin reads it, so there is nothing to tune."""
    return Range(min=1, opt=1, max=size)
