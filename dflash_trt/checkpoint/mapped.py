# SPDX-License-Identifier: Apache-2.0
"""Weights as memory-mapped arrays: a checkpoint needs no memory beyond the page cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor
from dflash_trt.checkpoint.safetensors_file import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""BF16 as its bits: numpy lacks the type, and the packers read bits."""


def map_tensor(tensor: StoredTensor) -> NDArray[Any]:
    """A read-only memory map of the tensor, in its shape; a decoded tensor becomes an array in memory."""
    import numpy as np

    shape = tensor.shape or (1,)
    if isinstance(tensor, DecodedTensor):
        return tensor.whole()
    return np.memmap(tensor.file, NUMPY_TYPES[tensor.dtype], mode="r", offset=tensor.offset, shape=shape)


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """An array of `map_tensor`, or a part of it, as float32: exact for all three types."""
    import ml_dtypes
    import numpy as np

    return (values.view(ml_dtypes.bfloat16) if values.dtype == np.dtype("<u2") else values).astype(np.float32)
