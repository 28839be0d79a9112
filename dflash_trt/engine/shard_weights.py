# SPDX-License-Identifier: Apache-2.0
"""The weights of one rank among several that share a drafter."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.safetensors_file import StoredTensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.checkpoint.weights import SINGLE, read_weights
from dflash_trt.engine.shards import Shard, shard_spec

# Ranks share a draft by tensor parallelism (Megatron-LM, arXiv 1909.08053): rows of q, k, v, gate and up, columns of o
# and down. Their biases, fc, norms and scales are whole on each, so that codes stay as they are.
LAYER = r"layers\.\d+\."
BY_ROWS = re.compile(
    LAYER + r"((self_attn\.[qkvg]|mlp\.gate|mlp\.up)_proj\.(weight|weight_scale|bias)|self_attn\.sinks)"
)
BY_COLUMNS = re.compile(LAYER + r"(self_attn\.o|mlp\.down)_proj\.(weight|weight_scale)")


def write_shard_weights(whole: DraftCheckpoint, shard: Shard, directory: Path) -> DraftCheckpoint:
    """A rank's part of the draft of an engine directory, its tensors written to `directory` in the same order."""
    tensors = read_tensors(whole.directory / SINGLE)
    layout = {name: (tensor.dtype, shard_shape(tensor, shard)) for name, tensor in tensors.items()}
    with SafetensorsWriter(directory / SINGLE, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, _part(tensor, shard))
    return msgspec.structs.replace(
        whole, directory=directory, spec=shard_spec(whole.spec, shard.num_ranks), weights=read_weights(directory)
    )


def shard_shape(tensor: StoredTensor, shard: Shard) -> tuple[int, ...]:
    """Shape of a rank's part; scalars of a shared layer are whole."""
    if not tensor.shape:
        return ()
    rows, *columns = tensor.shape
    if BY_ROWS.fullmatch(tensor.name):
        return (rows // shard.num_ranks, *columns)
    if BY_COLUMNS.fullmatch(tensor.name) and columns:
        return (rows, columns[0] // shard.num_ranks)
    return tensor.shape


def _part(tensor: StoredTensor, shard: Shard) -> NDArray[np.uint8]:
    """Bytes of a rank's part."""
    raw: NDArray[np.uint8] = np.memmap(
        tensor.file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,)
    )
    shape = shard_shape(tensor, shard)
    if shape == tensor.shape:
        return raw
    if shape[0] == tensor.shape[0]:
        raw = raw.reshape(shape[0], shard.num_ranks, -1)[:, shard.rank]
    else:
        raw = raw.reshape(shard.num_ranks, -1)[shard.rank]
    return np.ascontiguousarray(raw)
