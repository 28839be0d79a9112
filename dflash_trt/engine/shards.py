# SPDX-License-Identifier: Apache-2.0
"""A draft's tensors for one of several ranks: some of its KV heads with their queries, and of its MLP channels.

Rows of q, k, v, gate and up, columns of o and down, as tensor parallelism divides any transformer (Megatron-LM,
arXiv 1909.08053); what a rank adds to the others' is without bias everywhere but on rank 0. fc, norms and scales are
whole on each: scales are the whole tensor's, so that codes stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_shares import shard_spec
from dflash_trt.checkpoint.safetensors_file import Tensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.checkpoint.weights import SINGLE, read_weights
from dflash_trt.engine.signatures import Shard

LAYER = r"layers\.\d+\."
BY_ROWS = re.compile(
    LAYER + r"((self_attn\.[qkvg]|mlp\.gate|mlp\.up)_proj\.(weight|weight_scale|bias)|self_attn\.sinks)"
)
BY_COLUMNS = re.compile(LAYER + r"(self_attn\.o|mlp\.down)_proj\.(weight|weight_scale)")
ON_FIRST = re.compile(LAYER + r"(self_attn\.o|mlp\.down)_proj\.bias")


def write_shard(whole: DraftCheckpoint, shard: Shard, directory: Path) -> DraftCheckpoint:
    """A rank's part of the draft of an engine directory, its tensors written to `directory` in the same order."""
    tensors = read_tensors(whole.directory / SINGLE)
    layout = {name: (tensor.dtype, shard_shape(tensor, shard)) for name, tensor in tensors.items()}
    with SafetensorsWriter(directory / SINGLE, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, _part(tensor, shard))
    return msgspec.structs.replace(
        whole, directory=directory, spec=shard_spec(whole.spec, shard.num_ranks), weights=read_weights(directory)
    )


def shard_shape(tensor: Tensor, shard: Shard) -> tuple[int, ...]:
    """Of a rank's part; scalars of a layer that is shared are whole."""
    if not tensor.shape:
        return ()
    rows, *columns = tensor.shape
    if BY_ROWS.fullmatch(tensor.name):
        return (rows // shard.num_ranks, *columns)
    if BY_COLUMNS.fullmatch(tensor.name) and columns:
        return (rows, columns[0] // shard.num_ranks)
    return tensor.shape


def _part(tensor: Tensor, shard: Shard) -> NDArray[np.uint8]:
    """Its bytes."""
    raw: NDArray[np.uint8] = np.memmap(
        tensor.file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,)
    )
    shape = shard_shape(tensor, shard)
    if ON_FIRST.fullmatch(tensor.name) and shard.rank:
        return np.zeros_like(raw)
    if shape == tensor.shape:
        return raw
    if shape[0] == tensor.shape[0]:
        raw = raw.reshape(shape[0], shard.num_ranks, -1)[:, shard.rank]
    else:
        raw = raw.reshape(shard.num_ranks, -1)[shard.rank]
    return np.ascontiguousarray(raw)
