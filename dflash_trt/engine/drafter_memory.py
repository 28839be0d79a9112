# SPDX-License-Identifier: Apache-2.0
"""What a drafter on TensorRT takes of one GPU: exact where we allocate it, a bound where TensorRT does."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec

from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.plan import GRAPHS, PlanOptions
from dflash_trt.engine.signatures import Port

BYTES = {"BFLOAT16": 2, "FLOAT8E4M3FN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4}
PAGE_ROWS = 32  # kvcache's tokens of a page
WEIGHTS = ".safetensors"


class DrafterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """By what it holds."""

    weight_bytes: int
    """Files that both graphs point into; TensorRT may repack them."""
    cache_bytes: int
    """Context rows of all slots."""
    activation_bytes: int
    """Inputs and outputs of the largest call."""
    workspace_bytes: int
    """What both plans may take at most."""


def drafter_memory(manifest: Manifest, options: PlanOptions, directory: Path) -> DrafterMemory:
    """Of the engine at `directory`, with plans that serve `options`; where ranks share it, of the one that is given."""
    pages_of_a_slot = -(-options.max_seq_len // PAGE_ROWS)
    sizes = {
        "B": options.max_batch_size,
        "T": options.max_num_tokens,
        "slots": options.max_batch_size,
        "pages": pages_of_a_slot,
    }
    rows = {"T": options.max_batch_size * pages_of_a_slot * PAGE_ROWS}
    cache = sum(BYTES[port.dtype] * prod(port.sizes(rows)) for port in manifest.graphs["context"].outputs)
    activations = sum(BYTES[port.dtype] * prod(port.sizes(sizes)) for port in _tensors(manifest))
    weights = [directory / name for name in manifest.sha256 if name.endswith(WEIGHTS)]
    return DrafterMemory(
        weight_bytes=sum(file.stat().st_size for file in weights),
        cache_bytes=cache,
        activation_bytes=activations,
        workspace_bytes=len(GRAPHS) * options.workspace_bytes,
    )


def _tensors(manifest: Manifest) -> Iterator[Port]:
    """Inputs and outputs, each once: a shard's segments share them, and its streams have two buffers each."""
    context = manifest.graphs["context"]
    yield from (*context.inputs, *context.outputs)
    draft = (graph for name, graph in manifest.graphs.items() if name != "context")
    ports = (port for graph in draft for port in (*graph.inputs, *graph.outputs))
    yield from {_buffer(port.name): port for port in ports}.values()


def _buffer(name: str) -> tuple[str, int]:
    stream, _, segment = name.partition(".")
    return stream, int(segment or 0) % 2
