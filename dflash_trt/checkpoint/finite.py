# SPDX-License-Identifier: Apache-2.0
"""Refuses weights that are NaN or infinite, wherever they stand: one such value, and every answer is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.errors import CheckpointError, shown

# Signed type of a float's width, and the magnitude from which bits are no finite number: an exponent of ones.
# E4M3 has no infinity, and one NaN; E8M0 has no sign, and is never a weight but a scale of another dialect.
BITS = {
    "BF16": ("<i2", 0x7F80), "F16": ("<i2", 0x7C00), "F32": ("<i4", 0x7F800000), "F64": ("<i8", 0x7FF0 << 48),
    "F8_E4M3": ("i1", 0x7F), "F8_E5M2": ("i1", 0x7C),
}  # fmt: skip
CHUNK = 2**22  # elements: what a core's cache holds


def check_finite(weights: Iterable[Tensor]) -> None:
    """Reads all floating-point tensors once; raises CheckpointError, with tensor, file and place, for the first other.

    As integers, negative floats are the negative half and grow in magnitude with their bits: two maxima of the bits,
    signed and unsigned, say of a chunk whether it is finite.
    """
    for tensor in weights:
        if tensor.dtype not in BITS or tensor.num_bytes == 0:
            continue
        kind, limit = BITS[tensor.dtype]
        count = tensor.num_bytes // np.dtype(kind).itemsize
        bits = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=(count,))
        for begin in range(0, count, CHUNK):
            if not _is_finite(bits[begin : begin + CHUNK], limit):
                raise _refusal(tensor, bits[begin : begin + CHUNK], begin, limit)


def _is_finite(bits: NDArray[Any], limit: int) -> bool:
    sign = 1 << 8 * bits.dtype.itemsize - 1
    unsigned = bits.view(f"u{bits.dtype.itemsize}")
    return int(bits.max()) < limit and int(unsigned.max()) < sign + limit


def _refusal(tensor: Tensor, bits: NDArray[Any], begin: int, limit: int) -> CheckpointError:
    magnitudes = bits & np.iinfo(bits.dtype).max
    first = int(np.argmax(magnitudes >= limit))
    is_infinite = tensor.dtype != "F8_E4M3" and int(magnitudes[first]) == limit
    place = [int(i) for i in np.unravel_index(begin + first, tensor.shape or (1,))]
    return CheckpointError(
        f"{tensor.file}: tensor {shown(tensor.name)}: expected finite weights, found"
        f" {'infinity' if is_infinite else 'NaN'} at {place}",
        hint="download or copy the file again, or ask who trained it",
    )
