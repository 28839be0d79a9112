# SPDX-License-Identifier: Apache-2.0
"""What a drafter on TensorRT takes of one GPU: exact where we allocate it, a bound where TensorRT does."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec

from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plan import GRAPHS, PlanOptions

BYTES = {"BFLOAT16": 2, "FLOAT8E4M3FN": 1, "INT32": 4}
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
    """Of the engine at `directory`, with plans that serve `options`."""
    sizes = {
        "B": options.max_batch_size,
        "T": options.max_num_tokens,
        "slots": options.max_batch_size,
        "C_max": options.max_seq_len,
    }
    cache = activations = 0
    for graph in manifest.graphs.values():
        for port in (*graph.inputs, *graph.outputs):
            size = BYTES[port.dtype] * prod(port.sizes(sizes))
            if "slots" in port.shape:
                cache += size
            else:
                activations += size
    weights = [directory / name for name in manifest.sha256 if name.endswith(WEIGHTS)]
    return DrafterMemory(
        weight_bytes=sum(file.stat().st_size for file in weights),
        cache_bytes=cache,
        activation_bytes=activations,
        workspace_bytes=len(GRAPHS) * options.workspace_bytes,
    )
