# SPDX-License-Identifier: Apache-2.0
"""Weights as arrays that the page cache holds, so that a checkpoint needs no memory of its own; refuses NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.decoded import DecodedTensor
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError, shown

NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""BF16 as its bits: numpy has no such type, and the packers read them so."""
# Unsigned type of a float's width, and the bits of its exponent, all set in infinity and NaN. E4M3 has no infinity, and
# one NaN; E8M0 is never a weight but a scale of another dialect.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0 << 48),
    "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C),
}  # fmt: skip
CHUNK = 2**22  # elements: what a core's cache holds


def map_tensor(tensor: StoredTensor) -> NDArray[Any]:
    """The tensor in its shape, read only; the mapping ends with the array. A decoded one is an array in memory."""
    shape = tensor.shape or (1,)
    if isinstance(tensor, DecodedTensor):
        return tensor.whole()
    return np.memmap(tensor.file, NUMPY_TYPES[tensor.dtype], mode="r", offset=tensor.offset, shape=shape)


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """What `map_tensor` gave, or a part of it, as float32: exact for all three types."""
    if values.dtype == np.dtype("<u2"):
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def check_finite(weights: Iterable[StoredTensor]) -> None:
    """Reads all floating-point tensors once; raises CheckpointError, naming file, tensor and place.

    A single NaN or infinity spoils every answer.
    """
    for tensor in weights:
        if tensor.dtype not in EXPONENTS or tensor.num_bytes == 0:
            continue
        kind, exponent = EXPONENTS[tensor.dtype]
        begin = 0
        for bits in _chunks(tensor, kind):
            is_special = (bits & exponent) == exponent
            if is_special.any():
                place_in_chunk = int(is_special.argmax())
                index = begin + place_in_chunk
                is_infinite = int(bits[place_in_chunk]) in (exponent, exponent | 1 << 8 * bits.itemsize - 1)
                value = "infinity" if is_infinite and tensor.dtype != "F8_E4M3" else "NaN"
                place = [int(i) for i in np.unravel_index(index, tensor.shape or (1,))]
                raise CheckpointError(
                    f"{tensor.file}: tensor {shown(tensor.name)}: expected finite weights, found {value} at {place}",
                    hint="download or copy the file again, or ask who trained it",
                )
            begin += len(bits)


def _chunks(tensor: StoredTensor, kind: str) -> Iterator[NDArray[Any]]:
    """The elements as integers of type `kind`, in order, some at a time."""
    if isinstance(tensor, DecodedTensor):
        yield from (block.reshape(-1) for block in tensor.blocks())
        return
    bits = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=tensor.shape or (1,)).reshape(-1)
    for begin in range(0, len(bits), CHUNK):
        yield bits[begin : begin + CHUNK]
