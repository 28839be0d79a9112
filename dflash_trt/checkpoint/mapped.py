# SPDX-License-Identifier: Apache-2.0
"""Weights as arrays that the page cache holds, so that a checkpoint needs no memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.safetensors_file import Tensor

NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""BF16 as its bits: numpy has no such type, and the packers read them so."""


def map_tensor(tensor: Tensor) -> NDArray[Any]:
    """The tensor in its shape, read only; the mapping ends with the array."""
    shape = tensor.shape or (1,)
    return np.memmap(tensor.file, NUMPY_TYPES[tensor.dtype], mode="r", offset=tensor.offset, shape=shape)


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """What `map_tensor` gave, or a part of it, as float32: exact for all three types."""
    if values.dtype == np.dtype("<u2"):
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
