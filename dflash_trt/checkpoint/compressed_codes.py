# SPDX-License-Identifier: Apache-2.0
"""Schemes of compressed-tensors 0.20, and the numbers that their codes stand for.

`weight_packed` I32 [out, in * bits / 32] holds offset-binary codes, low bits first; `weight` I8 or F8_E4M3 [out, in]
one code an element; NVFP4 is `weight_packed` U8 [out, in / 2], low nibble first. `weight_scale` is [1], [out, 1],
[out, in / group] or has one of each block; `weight_zero_point` has its shape, packed along rows beside packed codes.
w = (code - zero point) * scale, where NVFP4's scale is divided by `weight_global_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.checkpoint.safetensors_file import StoredTensor

Weights = dict[str, StoredTensor]
Floats = NDArray[np.float32]
PACKED, INT, FLOAT, NAIVE, NVFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
FORMATS = (PACKED, INT, FLOAT, NAIVE, NVFP4)
MAX_BLOCK = 2**31 - 1
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3() -> Floats:
    """The 256 values of E4M3 (OCP, no infinity)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


E4M3 = _e4m3()


class WeightArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights` of a group, QuantizationArgs of compressed-tensors; what is not None or true there has no effect."""

    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None
    dynamic: Literal[False] = False
    actorder: Literal["weight", "static", False] | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None for all of them."""
        match self.strategy or ("tensor" if not self.group_size else "group" if self.group_size > 0 else "channel"):
            case "block":
                text = self.block_structure
                rows, columns = map(int, text.split("x")) if isinstance(text, str) else text or (0, 0)
                return rows, columns
            case "group" | "tensor_group":
                return 1, self.group_size or 0
            case "channel":
                return 1, None
            case _:
                return None, None

    def check(self) -> None:
        """Raises ValueError for sizes of groups or blocks that are none."""
        if wrong := [size for size in self.block if size is not None and not 1 <= size <= MAX_BLOCK]:
            raise ValueError(f"sizes of groups and blocks are 1 to {MAX_BLOCK}, not {wrong[0]}")

    def __str__(self) -> str:
        """'int4, groups of 128, symmetric'."""
        rows, columns = self.block
        scales = f"groups of {columns}" if columns and rows == 1 else f"blocks of {rows} x {columns}"
        if columns is None:
            scales = "a scale for each row" if rows else "one scale"
        signs = "" if self.type == "float" else ", symmetric" if self.symmetric else ", with zero points"
        return f"{self.type}{self.num_bits}, {scales}{signs}"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How one module is stored."""

    weights: WeightArguments
    format: str
    activations: str
    """What its activations were: "", or "; activations float8, dynamic"."""

    def __str__(self) -> str:
        """'pack-quantized (int4, groups of 128, symmetric)'."""
        return f"{self.format} ({self.weights}{self.activations})"


def decoder(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Callable[[int, int], Floats]:
    """What gives rows `begin` to `end` of a weight of `shape` as float32, from a module's tensors `own`.

    A scale that is not finite gives weights that are not.
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
    """How many scales there are along rows and columns."""
    rows, columns = scheme.weights.block
    return ceil(shape[0] / (rows or shape[0])), ceil(shape[1] / (columns or shape[1]))


def _codes(scheme: Scheme, own: Weights, columns: int) -> Callable[[int, int], Floats]:
    """What gives rows of codes as numbers, in an array of its own."""
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


def _zero_points(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Floats | None:
    """The zero points [rows, columns] of the grid, None in a symmetric scheme."""
    if scheme.weights.symmetric:
        return None
    tensor, sizes = own["weight_zero_point"], grid(scheme, shape)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    if scheme.format != PACKED:
        return raw.view(np.int8).astype(np.float32).reshape(sizes)
    words = np.ascontiguousarray(raw.view("<u4").reshape(tensor.shape).T)  # packed along rows
    return _offset_binary(words.view(np.uint8), scheme.weights.num_bits)[:, : sizes[0]].T


def _scales(scheme: Scheme, own: Weights, shape: tuple[int, int]) -> Callable[[int, int], Floats]:
    """What gives the scales of rows; one that is not finite makes a weight that `check_finite` names."""
    tensor, sizes = own["weight_scale"], grid(scheme, shape)
    if scheme.format != NVFP4:
        return lambda begin, end: _spread(scheme, map_tensor(tensor).reshape(sizes), begin, end, shape[1])
    codes: NDArray[np.uint8] = np.memmap(tensor.file, np.uint8, "r", tensor.offset, sizes)
    common = as_float32(map_tensor(own["weight_global_scale"])).reshape(1, 1)
    return lambda begin, end: E4M3[_spread(scheme, codes, begin, end, shape[1])] / common


def _spread(scheme: Scheme, values: NDArray[Any], begin: int, end: int, columns: int) -> NDArray[Any]:
    """The values of the grid for rows `begin` to `end`, each where its block lies."""
    block_rows, block_columns = scheme.weights.block
    rows = values[np.arange(begin, end) // block_rows] if block_rows else values
    return rows if block_columns is None else np.repeat(rows, block_columns, axis=1)[:, :columns]


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes of each byte, the low one first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)


def _offset_binary(raw: NDArray[np.uint8], bits: int) -> Floats:
    """Codes of 4 or 8 bits, of which half their range is 0."""
    codes = _nibbles(raw) if bits == 4 else raw
    return codes.astype(np.float32) - np.float32(2 ** (bits - 1))
