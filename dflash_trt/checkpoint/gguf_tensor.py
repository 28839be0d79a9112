# SPDX-License-Identifier: Apache-2.0
"""A tensor of a GGUF file, dense or decoded by the package gguf."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoint.decoded_tensor import decoded
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT, StoredTensor, damaged
from dflash_trt.errors import CheckpointError, MissingDependencyError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DENSE = {0: "F32", 26: "I32", 27: "I64", 30: "BF16"}
"""Types of tensors that need no decoding."""
F16 = 1
NVFP4 = 40
SERVED = "llama.cpp serves it (--spec-type draft-dflash); give dflash-trt the safetensors that it was made from"


def gguf_tensor(file: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    """The tensor of ggml's type `kind` at `offset`; raises CheckpointError for a type that cannot be decoded."""
    if (dtype := DENSE.get(kind)) is not None:
        size = math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8
        return StoredTensor(name=name, dtype=dtype, shape=shape, file=file, offset=offset, num_bytes=size)
    import numpy as np

    per_block, block_bytes, stored_type, unpack = _format(file, name, kind)
    if shape[-1] % per_block:
        columns = f"columns in blocks of {per_block} for {stored_type}"
        raise damaged(file, f"tensor {shown(name)}: expected {columns}, found {shape[-1]}")
    width = shape[-1] // per_block * block_bytes

    def decode(begin: int, end: int) -> NDArray[np.float32]:
        raw = np.memmap(file, np.uint8, "r", offset + begin * width, (end - begin, width))
        with np.errstate(all="ignore"):
            values: NDArray[np.float32] = unpack(raw)
        return values

    return decoded(file, name, shape, decode, stored_type, math.prod(shape[:-1]) * width)


def _format(file: Path, name: str, kind: int) -> tuple[int, int, str, Callable[[NDArray[np.uint8]], Any]]:
    """Elements and bytes of a block of a type, the type's name, and the function that decodes blocks to float32."""
    import numpy as np

    if kind == F16:  # llama.cpp's converter writes BF16 as F16
        return 1, 2, "F16", lambda raw: raw.view("<f2").astype(np.float32)
    gguf = _package(file)
    try:
        quantised = gguf.GGMLQuantizationType(kind)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quantised)
    except (ValueError, KeyError, NotImplementedError):
        raise _unread(file, name, f"the type {kind}") from None
    if kind == NVFP4:
        raise _unread(file, name, "NVFP4, which has scales in other tensors")
    return per_block, block_bytes, quantised.name, lambda raw: gguf.dequantize(raw, quantised)


def _unread(file: Path, name: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: tensor {shown(name)}: expected F32, F16, BF16 or a type that the package gguf decodes, found {found}",
        hint=SERVED,
    )


def _package(file: Path) -> Any:
    if find_spec("gguf") is None:
        raise MissingDependencyError(
            f"{file}: its tensors are quantised, and the package gguf, which decodes them, is not installed",
            hint="pip install 'dflash-trt[run]'",
        )
    import gguf

    return gguf
