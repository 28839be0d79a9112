# SPDX-License-Identifier: Apache-2.0
"""A graph's weights as their files hold them: where each lies and what its bytes mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from dflash_trt import _C
from dflash_trt.checkpoint.quantization import BLOCK
from dflash_trt.errors import EngineError

DENSE = {
    TensorProto.FLOAT: ("FLOAT", "<f4"),
    TensorProto.FLOAT16: ("FLOAT16", "<f2"),
    TensorProto.BFLOAT16: ("BFLOAT16", "<u2"),
}
"""Name of the format, and the NumPy type that holds its bits."""
BITS = dict(DENSE.values())
PIECE = 2**18
"""Values that are computed at a time: FLOAT, they stay in the cache of a core."""


class WeightLocation(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int

    def map(self) -> NDArray[np.uint8]:
        """Them, read only, as the page cache holds them."""
        return np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=self.num_bytes)


class Packed(NamedTuple):
    """A stored weight."""

    format: str
    """FLOAT, FLOAT16, BFLOAT16, FP8 or NVFP4."""
    shape: tuple[int, ...]
    codes: WeightLocation
    """Row by row; two codes of NVFP4 in a byte, low nibble first."""
    scale: float = 1.0
    """FP8's, or that of NVFP4's block scales."""
    block_scales: WeightLocation | None = None
    """NVFP4: [rows, columns / 16], e4m3."""

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """Its values in FLOAT, some rows at a time."""
        codes = self.codes.map()
        if self.block_scales is not None:
            rows, columns = self.shape
            by_block = self.block_scales.map().reshape(rows, -1)
            for part, scales in _split(PIECE // 2, codes.reshape(rows, -1), by_block):
                out = np.empty((len(part), columns), np.float32)
                _C.unpack_nvfp4(part, scales, self.scale, out, threads=1)
                yield out
            return
        values = codes.view(BITS.get(self.format, np.uint8)).reshape(self.shape)
        for (part,) in _split(PIECE, values):
            match self.format:
                case "FP8":
                    out = np.empty(part.shape, np.float32)
                    _C.unpack_fp8(part, self.scale, out, threads=1)
                    yield out
                case "BFLOAT16":
                    yield np.left_shift(part, 16, dtype=np.uint32).view(np.float32)
                case _:
                    yield part.astype(np.float32)


class Weight(NamedTuple):
    """Stored weights joined along axis 0; most often it is one."""

    parts: tuple[Packed, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all parts together."""
        first = self.parts[0].shape
        return first if len(self.parts) == 1 else (sum(part.shape[0] for part in self.parts), *first[1:])

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        """Its values in FLOAT and in order, some at a time."""
        return chain.from_iterable(part.pieces() for part in self.parts)


def stored_weights(graph: onnx.GraphProto, directory: Path) -> dict[str, Weight]:
    """The values of `graph` that are made of its weights in files alone: by casts, joining and dequantising.

    Raises EngineError for data that is not in a file of `directory`, or shorter than the graph says.
    """
    stored = _Stored(graph, directory)
    weights = {name: Weight((packed,)) for name in stored.external if (packed := stored.dense(name)) is not None}
    for node in graph.node:
        if (weight := _computed(node, weights, stored)) is not None:
            weights[node.output[0]] = weight
    return weights


def _computed(node: onnx.NodeProto, weights: dict[str, Weight], stored: _Stored) -> Weight | None:
    """What `node` makes of weights: a weight once more, or None for all else."""
    match node.op_type:
        case "Cast" if node.input[0] in weights:  # to the compute dtype, which is FLOAT here
            return weights[node.input[0]]
        case "Concat" if all(name in weights for name in node.input):
            return Weight(tuple(part for name in node.input for part in weights[name].parts))
        case "DequantizeLinear" if any(attribute.name == "block_size" for attribute in node.attribute):
            packed = stored.nvfp4(node.input[0], node.input[1])
        case "DequantizeLinear":
            packed = stored.fp8(node.input[0], node.input[1])
        case _:
            return None
    return packed and Weight((packed,))


class _Stored:
    """The initializers of a graph, with their data in files of `directory` or in the graph."""

    def __init__(self, graph: onnx.GraphProto, directory: Path) -> None:
        self._directory = directory.resolve()
        self._initializers = {initializer.name: initializer for initializer in graph.initializer}
        self.external = [i.name for i in graph.initializer if i.data_location == TensorProto.EXTERNAL]
        self._block_scales = {
            node.output[0]: (node.input[0], node.input[1])
            for node in graph.node
            if node.op_type == "DequantizeLinear" and self._is(node.input[0], TensorProto.FLOAT8E4M3FN)
        }

    def dense(self, name: str) -> Packed | None:
        initializer = self._initializers[name]
        if initializer.data_type not in DENSE:
            return None
        label, bits = DENSE[initializer.data_type]
        shape = tuple(initializer.dims)
        return Packed(label, shape, self._place(name, math.prod(shape) * np.dtype(bits).itemsize))

    def fp8(self, codes: str, scale: str) -> Packed | None:
        """e4m3 codes times one scale, both stored."""
        if not self._is(codes, TensorProto.FLOAT8E4M3FN) or scale not in self._initializers:
            return None
        shape = tuple(self._initializers[codes].dims)
        return Packed("FP8", shape, self._place(codes, math.prod(shape)), self._scalar(scale))

    def nvfp4(self, codes: str, scales: str) -> Packed | None:
        """e2m1 codes times block scales, which are e4m3 codes times one scale; all stored."""
        if not self._is(codes, TensorProto.FLOAT4E2M1) or scales not in self._block_scales:
            return None
        block_scales, scale = self._block_scales[scales]
        rows, columns = self._initializers[codes].dims
        places = self._place(codes, rows * columns // 2), self._place(block_scales, rows * columns // BLOCK)
        return Packed("NVFP4", (rows, columns), places[0], self._scalar(scale), places[1])

    def _is(self, name: str, data_type: int) -> bool:
        initializer = self._initializers.get(name)
        return initializer is not None and initializer.data_type == data_type and name in self.external

    def _scalar(self, name: str) -> float:
        if name not in self.external:
            return float(numpy_helper.to_array(self._initializers[name]))
        packed = self.dense(name)
        assert packed is not None, name
        return float(next(packed.pieces()).item())

    def _place(self, name: str, num_bytes: int) -> WeightLocation:
        """Where the data of an initializer lies."""
        entries = {entry.key: entry.value for entry in self._initializers[name].external_data}
        file = (self._directory / entries["location"]).resolve()
        if not file.is_relative_to(self._directory):
            raise EngineError(
                f"{self._directory}: expected weights inside it, found {entries['location']} -> {file}",
                hint="copy the engine with its files in the place of links (cp -rL), or build it again",
            )
        place = WeightLocation(file, int(entries.get("offset", 0)), num_bytes)
        size = file.stat().st_size if file.is_file() else 0
        if place.offset < 0 or num_bytes < 1 or place.offset + num_bytes > size:
            raise EngineError(
                f"{file}: expected {num_bytes} bytes of {name} at {place.offset}, found a file of {size}",
                hint="build the engine again",
            )
        return place


def _split(num_values: int, *arrays: NDArray[Any]) -> Iterator[Sequence[NDArray[Any]]]:
    """Arrays of as many rows, some rows of each at a time: of the first at most `num_values`, or one.

    A scalar is one row.
    """
    rows = [np.atleast_1d(array) for array in arrays]
    step = max(1, num_values // max(1, math.prod(rows[0].shape[1:])))
    for begin in range(0, len(rows[0]), step):
        yield [array[begin : begin + step] for array in rows]
