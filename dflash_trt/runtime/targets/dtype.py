# SPDX-License-Identifier: Apache-2.0
"""In which type a target is computed: `--dtype auto|float32|bfloat16`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.api.runtime_options import check_dtype
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def target_dtype(asked: str, directory: Path, weights: Mapping[str, StoredTensor]) -> torch.dtype:
    """The type to compute a target in, whose tensors are `weights`.

    `auto` is FLOAT: it holds each value of a BF16, F16 or F32 checkpoint, and what a block rounds otherwise than a
    token alone is too small to flip a choice. Raises RequestError for no such type, CheckpointError for BF16 where the
    checkpoint is of another, which it would round.
    """
    import torch

    check_dtype(asked)
    if asked != "bfloat16":
        return torch.float32
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    stored = max((name for name in FLOATS if sizes[name]), key=lambda name: sizes[name], default="BF16")
    if sizes["F16"]:
        stored = "F16"
    if stored != "BF16":
        example = next(tensor for tensor in weights.values() if tensor.dtype == stored)
        raise CheckpointError(
            f"{directory}: dtype bfloat16: expected weights in bfloat16, found {FLOATS[stored]} ({example.name}), which"
            " bfloat16 would round",
            hint="decode it with --dtype float32, which holds every value",
        )
    return torch.bfloat16
