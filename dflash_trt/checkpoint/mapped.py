# SPDX-License-Identifier: Apache-2.0
"""Weights as arrays that the page cache holds, so that a checkpoint needs no memory of its own; refuses NaN.

Tensors packed by another quantiser are presented as BF16 and decoded on read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUMPY_TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""BF16 as its bits: numpy has no such type, and the packers read them so."""
# Unsigned type of a float's width, and the bits of its exponent, all set in infinity and NaN. E4M3 has no infinity, and
# one NaN; E8M0 is never a weight but a scale of another dialect.
EXPONENTS = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0 << 48),
    "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C),
}  # fmt: skip
CHUNK = 2**22
"""Elements that are read or decoded at a time: what a core's cache holds."""
NOWHERE = -1
"""Offset of a decoded tensor, which has no bytes on disk; mapping it fails."""


class DecodedTensor(StoredTensor, frozen=True, kw_only=True):
    """A BF16 tensor [..., columns] that `decode` makes of a file's codes; `num_bytes` are those of the BF16."""

    decode: Callable[[int, int], NDArray[np.float32]]
    """Rows `begin` to `end` as float32, all axes but the last taken as one."""
    stored_type: str
    """Type of its codes, as their format calls it."""
    stored_bytes: int
    """Bytes of its codes and scales."""

    def blocks(self) -> Iterator[NDArray[np.uint16]]:
        """Yields the rows, some at a time, as the bits of BF16."""
        rows, step = math.prod(self.shape[:-1]), max(1, CHUNK // max(1, self.shape[-1]))
        for begin in range(0, rows, step):
            yield bfloat16(self.decode(begin, min(begin + step, rows)))

    def whole(self) -> NDArray[np.uint16]:
        """All of it as the bits of BF16."""
        import numpy as np

        values, begin = np.empty((math.prod(self.shape[:-1]), self.shape[-1]), np.uint16), 0
        for block in self.blocks():
            values[begin : begin + len(block)] = block
            begin += len(block)
        return values.reshape(self.shape)


def decoded(
    file: Path, name: str, shape: tuple[int, ...], decode: Callable[[int, int], NDArray[np.float32]],
    stored_type: str, stored_bytes: int,
) -> DecodedTensor:  # fmt: skip
    """The tensor `name` that `decode` makes of what lies in `file`."""
    return DecodedTensor(
        name=name, dtype="BF16", shape=shape, file=file, offset=NOWHERE, num_bytes=2 * math.prod(shape), decode=decode,
        stored_type=stored_type, stored_bytes=stored_bytes,
    )  # fmt: skip


def row_range(tensor: StoredTensor, name: str, begin: int, rows: int) -> StoredTensor:
    """Rows `begin` to `begin + rows` of a tensor as one called `name`; no byte is moved."""
    row = tensor.num_bytes // tensor.shape[0]
    part = msgspec.structs.replace(tensor, name=name, shape=(rows, *tensor.shape[1:]), num_bytes=rows * row)
    if not isinstance(tensor, DecodedTensor):
        return msgspec.structs.replace(part, offset=tensor.offset + begin * row)
    decode, stored = tensor.decode, tensor.stored_bytes * rows // tensor.shape[0]
    return msgspec.structs.replace(part, decode=lambda b, e: decode(begin + b, begin + e), stored_bytes=stored)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 values rounded to BF16, to nearest and ties to even; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def map_tensor(tensor: StoredTensor) -> NDArray[Any]:
    """The tensor in its shape, read only; the mapping ends with the array. A decoded one is an array in memory."""
    import numpy as np

    shape = tensor.shape or (1,)
    if isinstance(tensor, DecodedTensor):
        return tensor.whole()
    return np.memmap(tensor.file, NUMPY_TYPES[tensor.dtype], mode="r", offset=tensor.offset, shape=shape)


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """The result of `map_tensor`, or a part of it, as float32: exact for all three types."""
    import numpy as np

    if values.dtype == np.dtype("<u2"):
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def check_finite(weights: Iterable[StoredTensor]) -> None:
    """Reads all floating-point tensors once; raises CheckpointError, naming file, tensor and place.

    A single NaN or infinity spoils every answer.
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
    import numpy as np

    bits = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=tensor.shape or (1,)).reshape(-1)
    for begin in range(0, len(bits), CHUNK):
        yield bits[begin : begin + CHUNK]
