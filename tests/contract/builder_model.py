# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser and builder would say of a graph file: dtypes, shapes, fusion and the bytes of its weights.

The rules are read from onnx-tensorrt 10.10 and NvInfer.h; the builder itself has not been asked. A plugin node's
attributes are tried on the real creator in `plugin_creator.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import onnx
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from tests.contract.shapes import Extent, Shape, ShapeError, declared, integers, output_shapes, text
from tests.contract.strong_typing import Checker

BITS = {
    TensorProto.FLOAT4E2M1: 4, TensorProto.FLOAT8E4M3FN: 8, TensorProto.UINT8: 8, TensorProto.BFLOAT16: 16,
    TensorProto.FLOAT16: 16, TensorProto.FLOAT: 32,
}  # fmt: skip
MULTIPLICATIONS = {"Gemm", "MatMul"}


def problems(model: onnx.ModelProto, release: str, directory: Path) -> list[str]:
    """What is wrong with `model`, whose weights lie in `directory`; each begins with a node's or a tensor's name."""
    found = [*Checker(model, release).problems(), *_weights(model.graph, directory)]
    try:
        shapes = infer(model.graph)
    except ShapeError as problem:
        return [*found, str(problem)]
    return [*found, *_outputs(model.graph, shapes), *_fusion(model.graph, shapes)]


def infer(graph: onnx.GraphProto) -> dict[str, Shape]:
    """The shape of every value. Raises ShapeError, with the node's name, at the first that does not fit."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    shapes: dict[str, Shape] = {name: tuple(map(Extent, tensor.dims)) for name, tensor in initializers.items()}
    shapes |= {value.name: declared(value) for value in graph.input}
    for node in graph.node:
        try:
            constants = [integers(initializers.get(name)) for name in node.input]
            outputs = output_shapes(node, [shapes[name] for name in node.input], constants)
        except ShapeError as problem:
            raise ShapeError(f"{node.name}: {problem}") from None
        shapes |= dict(zip(node.output, outputs, strict=True))
    return shapes


def _outputs(graph: onnx.GraphProto, shapes: dict[str, Shape]) -> Iterator[str]:
    for value in graph.output:
        wanted, found = declared(value), shapes[value.name]
        if len(wanted) != len(found) or not all(a.is_same(b) for a, b in zip(wanted, found, strict=True)):
            yield f"{value.name}: declared {text(wanted)}, computed {text(found)}"


def _fusion(graph: onnx.GraphProto, shapes: dict[str, Shape]) -> Iterator[str]:
    """A dequantised value reaches a multiplication with nothing between but, where it is FP4, a Cast.

    Anything else makes the builder compute in BF16 what was to be a GEMM of FP8 or FP4. That Cast is in modelopt's
    export, too: the value has its scales' dtype. A MatMul of more than two axes counts as something between, because
    the parser gives the smaller operand axes by a shuffle.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "DequantizeLinear":
            continue
        is_blocked = any(attribute.name == "block_size" for attribute in node.attribute)
        value = node.output[0]
        users = readers.get(value, [])
        if all(user.op_type == "DequantizeLinear" and user.input[1] == value for user in users):
            continue  # block scales
        if is_blocked and [user.op_type for user in users] == ["Cast"]:
            value = users[0].output[0]
            users = readers.get(value, [])
        for user in users:
            if user.op_type not in MULTIPLICATIONS:
                yield f"{node.name}: {user.op_type} stands between it and a multiplication"
            elif any(len(shapes[name]) != 2 for name in user.input[:2]):
                yield f"{node.name}: a shuffle stands between it and {user.op_type} of more than two axes"


def _weights(graph: onnx.GraphProto, directory: Path) -> Iterator[str]:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.UINT8:
            yield f"{tensor.name}: UINT8, which the parser makes INT32"
        if not uses_external_data(tensor):
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        file, offset, length = directory / place["location"], int(place["offset"]), int(place["length"])
        if length * 8 != prod(tensor.dims) * BITS[tensor.data_type]:
            yield f"{tensor.name}: {length} bytes for {list(tensor.dims)}"
        if Path(place["location"]).name != place["location"]:
            yield f"{tensor.name}: {place['location']} is no file beside the graph"
        elif not file.is_file() or offset + length > file.stat().st_size:
            yield f"{tensor.name}: bytes {offset} to {offset + length} are not in {file.name}"
