# SPDX-License-Identifier: Apache-2.0
"""Refuses weights that are NaN or infinite, wherever they stand: one such value, and every answer is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.errors import CheckpointError, shown

# Unsigned type of a float's width, and the bits of its exponent, all set in infinity and NaN. E4M3 has no infinity, and
# one NaN; E8M0 is never a weight but a scale of another dialect.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0 << 48),
    "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C),
}  # fmt: skip
CHUNK = 2**22  # elements: what a core's cache holds


def check_finite(weights: Iterable[Tensor]) -> None:
    """Reads all floating-point tensors once; raises CheckpointError, naming file, tensor and place."""
    for tensor in weights:
        if tensor.dtype not in EXPONENTS or tensor.num_bytes == 0:
            continue
        kind, exponent = EXPONENTS[tensor.dtype]
        bits = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=tensor.shape or (1,)).reshape(-1)
        for begin in range(0, len(bits), CHUNK):
            is_special = (bits[begin : begin + CHUNK] & exponent) == exponent
            if is_special.any():
                index = begin + int(is_special.argmax())
                is_infinite = int(bits[index]) in (exponent, exponent | 1 << 8 * bits.itemsize - 1)
                value = "infinity" if is_infinite and tensor.dtype != "F8_E4M3" else "NaN"
                place = [int(i) for i in np.unravel_index(index, tensor.shape or (1,))]
                raise CheckpointError(
                    f"{tensor.file}: tensor {shown(tensor.name)}: expected finite weights, found {value} at {place}",
                    hint="download or copy the file again, or ask who trained it",
                )
