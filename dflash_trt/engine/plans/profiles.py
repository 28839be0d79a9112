# SPDX-License-Identifier: Apache-2.0
"""Optimisation profiles of plans.

TensorRT's have a profile for each batch size of TensorRT-LLM's CUDA graphs, with kernels chosen for its size.
"""

from __future__ import annotations

from math import log

from dflash_trt.engine.plans.plan import PlanOptions, Profile, Range
from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES, Graph

SMALLEST_ROWS = 16  # context rows of a decode step with few requests; below, only launch overhead is left
MOST_PAGES = MAX_CONTEXT // PAGE_SIZES[0]
COARSE_ROWS = 256  # up to here weights are what a GEMM waits for, so that padding to the next power of 4 is free
RTX_PROFILES = 4  # TensorRT-RTX compiles the kernels of each on the GPU, at the first start


def graph_batch_sizes(largest: int) -> list[int]:
    """Batch sizes of TensorRT-LLM's CUDA graphs (llmapi/llm_args.py, CudaGraphConfig, padded), and the largest."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest + 1, 64)]
    return sorted({size for size in sizes if size < largest} | {largest})


def profiles(graph: str, options: PlanOptions) -> tuple[Profile, ...]:
    """The profiles of a graph, by rising size; B and T are fixed in each, because shorter calls are padded."""
    thin = few if options.runtime == "tensorrt_rtx" else list
    if graph == "context":
        return tuple({"T": Range(min=T, opt=T, max=T)} for T in thin(row_buckets(options.max_num_tokens)))
    slots = options.max_batch_size + 1  # TensorRT-LLM's context arena has one more, for padding
    # Only the plugin reads the page table, so there is nothing to tune.
    table = {axis: Range(min=1, opt=1, max=size) for axis, size in (("slots", slots), ("pages", MOST_PAGES))}
    return tuple({"B": Range(min=B, opt=B, max=B), **table} for B in thin(graph_batch_sizes(options.max_batch_size)))


def row_buckets(largest: int) -> list[int]:
    """16, 64, 256, 512, 1024, ... and the largest."""
    doubling = (COARSE_ROWS << i for i in range(largest.bit_length()))
    return sorted({rows for rows in (SMALLEST_ROWS, 4 * SMALLEST_ROWS, *doubling) if rows < largest} | {largest})


def few(sizes: list[int]) -> list[int]:
    """At most RTX_PROFILES of `sizes`, in about equal ratios, the smallest and the largest among them."""
    growth = (sizes[-1] / sizes[0]) ** (1 / (RTX_PROFILES - 1))
    wanted = [sizes[0] * growth**step for step in range(RTX_PROFILES)]
    return sorted({min((abs(log(size / near)), size) for size in sizes)[1] for near in wanted})


def shapes(graph: Graph, profile: Profile) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Minimum, optimum and maximum shape of every input."""
    low, best, high = ({axis: getattr(r, bound) for axis, r in profile.items()} for bound in ("min", "opt", "max"))
    return {port.name: (port.sizes(low), port.sizes(best), port.sizes(high)) for port in graph.inputs}
