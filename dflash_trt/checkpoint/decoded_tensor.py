# SPDX-License-Identifier: Apache-2.0
"""Weights as arrays: mapped from their file, or presented as BF16 and decoded on read where they are packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.checkpoint.safetensors_file import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CHUNK = 2**22
"""Elements that are read or decoded at a time; they fit a core's cache."""
NOWHERE = -1
"""Offset of a decoded tensor, which has no bytes on disk; mapping it fails."""


class DecodedTensor(StoredTensor, frozen=True, kw_only=True):
    """A BF16 tensor [..., columns] that `decode` computes from codes in a file; `num_bytes` is the BF16 size."""

    decode: Callable[[int, int], NDArray[np.float32]]
    """Rows `begin` to `end` as float32, all axes but the last taken as one."""
    stored_type: str
    """Type of its codes, in the words of their format."""
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
    """The tensor `name`, decoded from `file` on read."""
    return DecodedTensor(
        name=name, dtype="BF16", shape=shape, file=file, offset=NOWHERE, num_bytes=2 * math.prod(shape), decode=decode,
        stored_type=stored_type, stored_bytes=stored_bytes,
    )  # fmt: skip


def row_range(tensor: StoredTensor, name: str, begin: int, rows: int) -> StoredTensor:
    """A view of rows `begin` to `begin + rows`, called `name`; no data is copied."""
    row = tensor.num_bytes // tensor.shape[0]
    part = msgspec.structs.replace(tensor, name=name, shape=(rows, *tensor.shape[1:]), num_bytes=rows * row)
    if not isinstance(tensor, DecodedTensor):
        return msgspec.structs.replace(part, offset=tensor.offset + begin * row)
    decode, stored = tensor.decode, tensor.stored_bytes * rows // tensor.shape[0]
    return msgspec.structs.replace(part, decode=lambda b, e: decode(begin + b, begin + e), stored_bytes=stored)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 values rounded to BF16, to nearest and ties to even; NaN stays NaN."""
    import ml_dtypes
    import numpy as np

    with np.errstate(invalid="ignore"):
        return values.astype(ml_dtypes.bfloat16, order="C").view(np.uint16)


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
