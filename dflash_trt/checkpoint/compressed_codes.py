# SPDX-License-Identifier: Apache-2.0
"""Decodes weights of compressed-tensors 0.20 to float32.

`weight_packed` I32 [out, in * bits / 32] holds offset-binary codes, low bits first; `weight` I8 or F8_E4M3 [out, in]
one code an element; NVFP4 is `weight_packed` U8 [out, in / 2], low nibble first. `weight_scale` is [1], [out, 1],
[out, in / group] or has one of each block; `weight_zero_point` has its shape, packed along rows beside packed codes
with a scale for each row or group.
w = (code - zero point) * scale, where NVFP4's scale is divided by `weight_global_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.compressed_scheme import NVFP4, PACKED, Scheme
from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.safetensors_file import Weights

Floats = NDArray[np.float32]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def decoder(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Callable[[int, int], Floats]:
    """A function that returns rows `begin` to `end` of a weight of `shape` as float32; `own` are the module's tensors.

    A scale that is not finite makes weights that are not, which `check_finite` reports.
    """
    codes, scales = _codes(scheme, own, shape[1]), _scales(scheme, own, shape)
    points = _zero_points(scheme, own, shape)

    def decode(begin: int, end: int) -> Floats:
        values = codes(begin, end)
        if points is not None:
            values -= _spread(scheme, points, begin, end, shape[1])
        with np.errstate(all="ignore"):
            return values * as_float32(scales(begin, end))

    return decode


def grid(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    """Numbers of scales along rows and columns."""
    rows, columns = scheme.weights.block
    return ceil(shape[0] / (rows or shape[0])), ceil(shape[1] / (columns or shape[1]))


def _codes(scheme: Scheme, own: Weights, columns: int) -> Callable[[int, int], Floats]:
    """A function that returns rows of codes as numbers, in a new array."""
    packed = own["weight_packed" if scheme.format in (PACKED, NVFP4) else "weight"]
    width = packed.num_bytes // packed.shape[0]

    def read(begin: int, end: int) -> Floats:
        place = packed.offset + begin * width
        raw: NDArray[np.uint8] = np.memmap(packed.file, np.uint8, "r", place, (end - begin, width))
        if scheme.format == NVFP4:
            return E2M1[_nibbles(raw)]
        if scheme.format == PACKED:
            return _offset_binary(raw, scheme.weights.num_bits)[:, :columns]
        return E4M3[raw] if packed.dtype == "F8_E4M3" else raw.view(np.int8).astype(np.float32)

    return read


def has_packed_points(scheme: Scheme) -> bool:
    """Whether zero points are packed along rows: those of rows and groups beside packed codes, I8 otherwise."""
    return not scheme.weights.symmetric and scheme.format == PACKED and scheme.weights.block[0] == 1


def _zero_points(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Floats | None:
    """The zero points [rows, columns] of the grid, None in a symmetric scheme."""
    if scheme.weights.symmetric:
        return None
    tensor, sizes = own["weight_zero_point"], grid(scheme, shape)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    if not has_packed_points(scheme):
        return raw.view(np.int8).astype(np.float32).reshape(sizes)
    words = np.ascontiguousarray(raw.view("<u4").reshape(tensor.shape).T)  # packed along rows
    return _offset_binary(words.view(np.uint8), scheme.weights.num_bits)[:, : sizes[0]].T


def _scales(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Callable[[int, int], Floats]:
    """A function that returns the scales of rows, each spread over its block."""
    tensor, sizes = own["weight_scale"], grid(scheme, shape)
    if scheme.format != NVFP4:
        return lambda begin, end: _spread(scheme, map_tensor(tensor).reshape(sizes), begin, end, shape[1])
    codes: NDArray[np.uint8] = np.memmap(tensor.file, np.uint8, "r", tensor.offset, sizes)
    common = as_float32(map_tensor(own["weight_global_scale"])).reshape(1, 1)
    return lambda begin, end: E4M3[_spread(scheme, codes, begin, end, shape[1])] / common


def _spread(scheme: Scheme, values: NDArray[Any], begin: int, end: int, columns: int) -> NDArray[Any]:
    """The grid's values for rows `begin` to `end`, repeated over their blocks."""
    block_rows, block_columns = scheme.weights.block
    rows = values[np.arange(begin, end) // block_rows] if block_rows else values
    return rows if block_columns is None else np.repeat(rows, block_columns, axis=1)[:, :columns]


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes of each byte, the low one first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)


def _offset_binary(raw: NDArray[np.uint8], bits: int) -> Floats:
    """Codes of 4 or 8 bits whose zero is half their range."""
    codes = _nibbles(raw) if bits == 4 else raw
    return codes.astype(np.float32) - np.float32(2 ** (bits - 1))
