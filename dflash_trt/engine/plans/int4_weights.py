# SPDX-License-Identifier: Apache-2.0
"""INT4 weights in the order that TensorRT reads: row after row.

A checkpoint has two rows in a byte, so its graph separates pairs after DequantizeLinear. TensorRT-RTX's builder would
transpose such a constant for each profile, and mistake the axis of its blocks where out / 2 equals in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dflash_trt.engine.graph.onnx_builder import prune


class UnpairedRows(NamedTuple):
    """A graph whose INT4 weights are [out, in] instead of [out / 2, in, 2]."""

    model: bytes
    weights: dict[str, NDArray[np.uint8]]
    """Bytes of each by name, which are in no file; empty if the graph has none. A network points into them."""

    @classmethod
    def read(cls, file: Path) -> UnpairedRows:
        """Reads an ONNX graph and the files of weights beside it."""
        model = onnx.load(file, load_external_data=False)
        weights = _unpair(model.graph, file.parent)
        return cls(model.SerializeToString(), weights)

    def parse(self, parser: Any, file: Path) -> bool:
        """Whether TensorRT's ONNX parser accepts the graph, which was read from `file`."""
        if not self.weights:
            return bool(parser.parse_from_file(str(file)))
        is_taken = parser.load_model_proto(self.model, str(file))
        for name, rows in self.weights.items():
            is_taken = is_taken and parser.load_initializer(name, rows.ctypes.data, rows.nbytes)
        return bool(is_taken and parser.parse_model_proto())


def _unpair(graph: onnx.GraphProto, directory: Path) -> dict[str, NDArray[np.uint8]]:
    codes = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT4}
    made_by = {output: node for node in graph.node for output in node.output}
    weights = dict[str, NDArray[np.uint8]]()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in codes:
            weights[node.input[0]] = _unpaired(codes[node.input[0]], directory)
            node.input[1] = _source(node.input[1], made_by)  # [out, in / 32]
        elif node.op_type == "MatMul":
            transpose = made_by[node.input[1]]
            transpose.input[0] = _source(transpose.input[0], made_by)
    prune(graph)
    return weights


def _source(value: str, made_by: dict[str, onnx.NodeProto]) -> str:
    """The value before Transpose and Reshape nodes."""
    while made_by[value].op_type in ("Transpose", "Reshape"):
        value = made_by[value].input[0]
    return value


def _unpaired(tensor: TensorProto, directory: Path) -> NDArray[np.uint8]:
    """The bytes [out / 2, 2, in / 2] of `tensor`, low nibbles first, which then is one of [out, in]."""
    pairs, columns, _ = tensor.dims
    place = {entry.key: entry.value for entry in tensor.external_data}
    packed = np.memmap(directory / place["location"], np.uint8, "r", int(place["offset"]), (pairs, columns))
    rows = np.empty((pairs, 2, columns // 2), np.uint8)
    for i, codes in enumerate((packed & 15, packed >> 4)):
        np.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=rows[:, i])
    tensor.dims[:] = [2 * pairs, columns]
    return rows
