# SPDX-License-Identifier: Apache-2.0
"""Optimisation profiles: one for each batch bucket, so that each CUDA graph runs kernels chosen for its size."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.engine.manifest import Graph
from dflash_trt.engine.plan import PlanOptions, Profile, Range

SMALLEST_ROWS = 16  # context rows of a decode step with few requests; below, only launch overhead is left
COARSE_ROWS = 256  # up to here weights are what a GEMM waits for, so that padding to the next power of 4 is free

InputShapes = Mapping[str, tuple[str | int, ...]]
"""By input; strings are the axes of a profile."""


def profiles(graph: str, options: PlanOptions, block_size: int) -> tuple[Profile, ...]:
    """The profiles of a graph, by rising size; B and T are fixed in each, because shorter calls are padded."""
    if graph == "context":
        return tuple({"T": _fixed(T)} for T in row_buckets(options.max_num_tokens))
    slots = options.max_batch_size + 1  # TensorRT-LLM's context arena has one more, for padding
    cache = {"slots": _up_to(slots), "C_max": _up_to(options.max_seq_len)}
    return tuple({"B": _fixed(B), "S": _fixed(block_size), **cache} for B in batch_buckets(options.max_batch_size))


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return _rising(1, 2, largest)


def row_buckets(largest: int) -> list[int]:
    """16, 64, 256, 512, 1024, ... and the largest."""
    fine = _rising(2 * COARSE_ROWS, 2, largest) if largest > COARSE_ROWS else []
    return [*_rising(SMALLEST_ROWS, 4, min(largest, COARSE_ROWS)), *fine]


def input_shapes(graph: Graph) -> InputShapes:
    """Those of a graph that is written."""
    return {port.name: port.shape for port in graph.inputs}


def planned_inputs(
    *, num_layers: int, hidden_size: int, num_taps: int, num_kv_heads: int, head_dim: int
) -> dict[str, InputShapes]:
    """Those of both graphs as they will be written, for a draft of which only sizes are known."""
    cache = ("slots", num_layers, "C_max", num_kv_heads, head_dim)
    return {
        "context": {"target_hidden": ("T", num_taps * hidden_size), "positions": ("T",)},
        "draft": {
            "noise_embeds": ("B", "S", hidden_size),
            "positions": ("B", "S"),
            "k_cache": cache,
            "v_cache": cache,
            "slot_ids": ("B",),
            "context_lengths": ("B",),
        },
    }


def shapes(inputs: InputShapes, profile: Profile) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Minimum, optimum and maximum shape of every input."""

    def sizes(axes: tuple[str | int, ...], bound: str) -> list[int]:
        return [getattr(profile[axis], bound) if isinstance(axis, str) else axis for axis in axes]

    return {name: (sizes(axes, "min"), sizes(axes, "opt"), sizes(axes, "max")) for name, axes in inputs.items()}


def _rising(smallest: int, factor: int, largest: int) -> list[int]:
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * factor, largest))
    return sizes


def _fixed(size: int) -> Range:
    return Range(min=size, opt=size, max=size)


def _up_to(size: int) -> Range:
    return Range(min=1, opt=size, max=size)
