# SPDX-License-Identifier: Apache-2.0
"""A graph's weights as FLOAT, each dequantised once, into files that ONNX Runtime maps and then packs from.

ONNX Runtime would compute them, too, by folding constants; but it keeps every intermediate of that until the session
stands, which for NVFP4 is five times the FLOAT weights. The values are the same to the bit. Files, because it keeps
what it is given in memory (1.31: `add_external_initializers`) beside what it packs, but unmaps files as it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from dflash_trt import _C
from dflash_trt.checkpoint.quantization import BLOCK
from dflash_trt.errors import EngineError
from dflash_trt.graph.pruning import prune
from dflash_trt.graph.weight_files import Matrix, split, weight_files

BITS = {TensorProto.BFLOAT16: "<u2", TensorProto.FLOAT16: "<f2", TensorProto.FLOAT: "<f4"}


@contextmanager
def float_weights(model: onnx.ModelProto, directory: Path) -> Iterator[Path]:
    """Makes each weight of `model`, whose data lies in `directory`, a FLOAT initializer in a file of its own.

    Gives their folder, for one session: its files go as they are mapped, and afterwards it is gone. Nodes that computed
    weights from weights are gone. Raises EngineError for data that is not in `directory`, and where there is no room
    for the files.
    """
    graph = model.graph
    stored = _Stored(graph, directory)
    matrices = {name: stored.dense(name) for name in stored.names(BITS)}
    for node in graph.node:
        if (matrix := _computed(node, matrices, stored)) is not None:
            matrices[node.output[0]] = matrix
    read = {name for node in graph.node if node.output[0] not in matrices for name in node.input}
    weights = {name: matrix for name, matrix in matrices.items() if name in read}
    _replace(graph, weights)
    with weight_files(list(weights.values())) as folder:
        yield folder


def _replace(graph: onnx.GraphProto, weights: dict[str, Matrix]) -> None:
    """Initializers in the place of what computed the weights, each in a file named by its number."""
    nodes = [node for node in graph.node if node.output[0] not in weights]
    initializers = [i for i in graph.initializer if i.name not in weights]
    for number, (name, matrix) in enumerate(weights.items()):
        proto = TensorProto(
            name=name, data_type=TensorProto.FLOAT, dims=matrix.shape, data_location=TensorProto.EXTERNAL
        )
        proto.external_data.add(key="location", value=str(number))
        initializers.append(proto)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)
    prune(graph)


def _computed(node: onnx.NodeProto, matrices: dict[str, Matrix], stored: _Stored) -> Matrix | None:
    """What `node` makes of weights: a matrix once more, or None for all else."""
    match node.op_type:
        case "Cast" if node.input[0] in matrices:  # to the compute dtype, which is FLOAT here
            return matrices[node.input[0]]
        case "Concat" if all(name in matrices for name in node.input):
            return _joined([matrices[name] for name in node.input])
        case "DequantizeLinear" if any(attribute.name == "block_size" for attribute in node.attribute):
            return stored.nvfp4(node.input[0], node.input[1])
        case "DequantizeLinear":
            return stored.fp8(node.input[0], node.input[1])
    return None


def _joined(parts: Sequence[Matrix]) -> Matrix:
    """Matrices joined along axis 0."""
    num_rows = sum(part.shape[0] for part in parts)
    return Matrix((num_rows, *parts[0].shape[1:]), lambda: chain.from_iterable(part.pieces() for part in parts))


class _Stored:
    """The initializers of a graph, with their data in files of `directory` or in the graph."""

    def __init__(self, graph: onnx.GraphProto, directory: Path) -> None:
        self._directory = directory.resolve()
        self._initializers = {initializer.name: initializer for initializer in graph.initializer}
        self._block_scales = {
            node.output[0]: (node.input[0], node.input[1])
            for node in graph.node
            if node.op_type == "DequantizeLinear" and self._is(node.input[0], TensorProto.FLOAT8E4M3FN)
        }

    def names(self, types: Iterable[int]) -> list[str]:
        """Those in files, of any of these types."""
        types = set(types)
        return [name for name, i in self._initializers.items() if i.data_type in types and _is_external(i)]

    def dense(self, name: str) -> Matrix:
        initializer = self._initializers[name]
        shape = tuple(initializer.dims)

        def pieces() -> Iterator[NDArray[np.float32]]:
            for (values,) in split(self._map(name, BITS[initializer.data_type], shape)):
                if initializer.data_type == TensorProto.BFLOAT16:
                    yield np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
                else:
                    yield values.astype(np.float32)

        return Matrix(shape, pieces)

    def fp8(self, codes: str, scale: str) -> Matrix | None:
        """e4m3 codes times one scale, both stored."""
        if not self._is(codes, TensorProto.FLOAT8E4M3FN) or scale not in self._initializers:
            return None
        shape = tuple(self._initializers[codes].dims)

        def pieces() -> Iterator[NDArray[np.float32]]:
            factor = self._scalar(scale)
            for (values,) in split(self._map(codes, "u1", shape)):
                out = np.empty(values.shape, np.float32)
                _C.unpack_fp8(values, factor, out, threads=1)
                yield out

        return Matrix(shape, pieces)

    def nvfp4(self, codes: str, scales: str) -> Matrix | None:
        """e2m1 codes times block scales, which are e4m3 codes times one scale; all stored."""
        if not self._is(codes, TensorProto.FLOAT4E2M1) or scales not in self._block_scales:
            return None
        block_scales, scale_2 = self._block_scales[scales]
        rows, columns = self._initializers[codes].dims

        def pieces() -> Iterator[NDArray[np.float32]]:
            factor = self._scalar(scale_2)
            data = self._map(codes, "u1", (rows, columns // 2))
            for values, by_block in split(data, self._map(block_scales, "u1", (rows, columns // BLOCK))):
                out = np.empty((len(values), columns), np.float32)
                _C.unpack_nvfp4(values, by_block, factor, out, threads=1)
                yield out

        return Matrix((rows, columns), pieces)

    def _is(self, name: str, data_type: int) -> bool:
        initializer = self._initializers.get(name)
        return initializer is not None and initializer.data_type == data_type and _is_external(initializer)

    def _scalar(self, name: str) -> float:
        initializer = self._initializers[name]
        if _is_external(initializer):
            return float(self._map(name, BITS[initializer.data_type], ()))
        return float(numpy_helper.to_array(initializer))

    def _map(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The data of an initializer, read only, as the page cache holds it."""
        place = {entry.key: entry.value for entry in self._initializers[name].external_data}
        file = (self._directory / place["location"]).resolve()
        if not file.is_relative_to(self._directory):
            raise EngineError(
                f"{self._directory}: expected weights inside it, found {place['location']} -> {file}",
                hint="copy the engine with its files in the place of links (cp -rL), or build it again",
            )
        try:
            data = np.memmap(file, dtype, mode="r", offset=int(place.get("offset", 0)), shape=shape or (1,))
        except (OSError, ValueError) as error:  # gone, or shorter than the graph says
            raise EngineError(
                f"{file}: expected {dtype} {list(shape)} for {name}, found: {error}", hint="build the engine again"
            ) from None
        return data.reshape(shape)


def _is_external(initializer: TensorProto) -> bool:
    return initializer.data_location == TensorProto.EXTERNAL
