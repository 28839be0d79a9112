# SPDX-License-Identifier: Apache-2.0
"""Refuses weights that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor
from dflash_trt.checkpoint.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Unsigned type of the same width, and the exponent's bits, which are all set in infinity and NaN. E4M3 has one NaN and
# no infinity. E8M0 is the type of scales of another dialect, never of weights.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0 << 48),
    "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C),
}  # fmt: skip
CHUNK = 2**18
"""Elements at a time: the arrays of more are mapped into memory anew, page by page, for each chunk."""


def check_finite(weights: Iterable[StoredTensor]) -> None:
    """Reads all floating-point tensors once; raises CheckpointError, naming file, tensor and place.

    A single NaN or infinity corrupts all output.
    """
    import numpy as np

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
                hint = "download or copy the file again, or ask who trained it"
                raise tensor.error("finite weights", f"{value} at {place}", hint)
            begin += len(bits)


def _chunks(tensor: StoredTensor, kind: str) -> Iterator[NDArray[Any]]:
    """The elements in order as integers of type `kind`, up to CHUNK at a time."""
    if isinstance(tensor, DecodedTensor):
        yield from (block.reshape(-1) for block in tensor.blocks())
        return
    import numpy as np

    bits = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=tensor.shape or (1,)).reshape(-1)
    for begin in range(0, len(bits), CHUNK):
        yield bits[begin : begin + CHUNK]
