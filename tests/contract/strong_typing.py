# SPDX-License-Identifier: Apache-2.0
"""Checks an ONNX graph as a strongly typed TensorRT network would: no implicit casts, only what the parser imports.

Rules: onnx-tensorrt's onnxOpImporters.cpp and docs/operators.md, NvInfer.h of TensorRT 10.15 and 11.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from dflash_trt.engine.graph.draft_graph import ATTENTION
from tests.contract.onnx_operators import OPERATORS, TYPES, importable

NAMES = {
    TensorProto.FLOAT: "FP32", TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16", TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64", TensorProto.FLOAT8E4M3FN: "FP8", TensorProto.FLOAT4E2M1: "FP4",
    TensorProto.UINT8: "UINT8", TensorProto.BOOL: "BOOL", TensorProto.INT4: "INT4",
}  # fmt: skip
SAME_TYPE = {"Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Concat"}
KEEPS_TYPE = SAME_TYPE | {
    "Gather", "Identity", "Pad", "Reshape", "ReduceMean", "Sigmoid", "Slice", "Softplus", "Split", "Sqrt", "Tanh",
    "TopK", "Transpose", "Unsqueeze",
}  # fmt: skip
SHAPE_INPUTS = {  # must be build-time constants
    "Pad": (1,),
    "Reshape": (1,),
    "ReduceMean": (1,),
    "Slice": (1, 2, 3),
    "Split": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
# rope; context_pointers, context_layout; page_table, slot_ids, context_lengths; sinks
PLUGIN_TYPES = {3: "FP32", 4: "INT64", 5: "INT64", 6: "INT32", 7: "INT32", 8: "INT32", 9: "FP32"}
PLUGIN_ATTRIBUTES = (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING)


class Checker:
    """One graph; `problems` names each node that TensorRT would refuse, and why."""

    def __init__(self, model: onnx.ModelProto, release: str) -> None:
        graph = model.graph
        self._graph = graph
        self._release = release
        self._opset = next(entry.version for entry in model.opset_import if entry.domain == "")
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._constants = set(self._initializers)
        self.types = {value.name: NAMES[value.type.tensor_type.elem_type] for value in graph.input}
        self.types |= {tensor.name: NAMES[tensor.data_type] for tensor in graph.initializer}

    def problems(self) -> Iterator[str]:
        lowest, highest = OPERATORS["releases"][self._release]["opsets"]
        if not lowest <= self._opset <= highest:
            yield f"opset {self._opset} is outside {lowest} to {highest}"
        for node in self._graph.node:
            yield from (f"{node.name}: {problem}" for problem in self._check(node))
            if self._constants.issuperset(node.input):
                self._constants.update(node.output)
        for value in self._graph.output:
            if (declared := NAMES[value.type.tensor_type.elem_type]) != self.types[value.name]:
                yield f"{value.name}: declared {declared}, computed {self.types[value.name]}"

    def _check(self, node: onnx.NodeProto) -> Iterator[str]:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        types = [self.types[name] for name in node.input]
        result = types[0]
        if "plugin_namespace" in attributes:
            yield from _plugin(node, attributes, types)
        elif not importable(node.op_type, self._release):
            yield f"{node.op_type} is no operator of TensorRT {self._release}'s parser"
        elif types[0] not in TYPES[node.op_type]:
            yield f"{node.op_type} does not take {types[0]}"
        match node.op_type:
            case "Cast":
                result = NAMES[attributes["to"].i]
                if result not in TYPES["Cast"]:
                    yield f"Cast does not make {result}"
            case "QuantizeLinear":
                yield from self._quantize(node, types)
                result = types[2]
            case "DequantizeLinear":
                yield from self._dequantize(node, attributes, types)
                result = types[1]
            case "TRT_FP4DynamicQuantize":
                yield from self._dynamic_quantize(node, attributes, types)
                self.types[node.output[1]] = "FP8"
                result = "FP4"
            case "ArgMax":
                result = "INT64"
            case "TopK":
                self.types[node.output[1]] = "INT64"
            case op_type if op_type not in KEEPS_TYPE | {ATTENTION}:
                yield f"{op_type}: this check does not know its rules"
        if node.op_type in SAME_TYPE and len(set(types)) > 1:
            yield f"{node.op_type} of {' and '.join(types)}"
        for index in SHAPE_INPUTS.get(node.op_type, ()):
            if node.input[index] not in self._initializers:
                yield f"input {index} is no initializer"
        for name in node.output:
            self.types.setdefault(name, result)

    def _quantize(self, node: onnx.NodeProto, types: list[str]) -> Iterator[str]:
        if types[1] != "FP32" and types[1] != types[0]:
            yield f"quantises {types[0]} by a scale of {types[1]}"
        scale = self._initializers.get(node.input[1])
        if scale is None or not _is_positive(scale):
            yield "the scale is no positive constant"
        elif len(scale.dims) and node.input[0] not in self._constants:
            yield "an activation is quantised by channel; TensorRT does that to weights only"

    def _dequantize(self, node: onnx.NodeProto, attributes: dict[str, Any], types: list[str]) -> Iterator[str]:
        since = {"FP8": 19, "INT4": 21, "FP4": 23}.get(types[0], 13)
        if self._opset < max(since, 21 if "block_size" in attributes else 0):
            yield f"{types[0]} is not of opset {self._opset}"
        if len(node.input) > 2:
            yield "a zero point is given"
        scale = self._initializers.get(node.input[1])
        if scale is not None and not uses_external_data(scale) and not _is_positive(scale):
            yield "the scale is not positive"
        if types[1] not in ("FP32", "FP16", "BF16"):
            yield f"a scale of {types[1]}"

    def _dynamic_quantize(self, node: onnx.NodeProto, attributes: dict[str, Any], types: list[str]) -> Iterator[str]:
        found = {name: attribute.i for name, attribute in attributes.items()}
        if found != {"axis": -1, "block_size": 16, "scale_type": TensorProto.FLOAT8E4M3FN}:
            yield f"attributes {found}"
        scale = self._initializers.get(node.input[1])
        if scale is None or len(scale.dims) or types[1] != "FP32" or not _is_positive(scale):
            yield "the scale is no positive FP32 scalar initializer"


def _plugin(node: onnx.NodeProto, attributes: dict[str, Any], types: list[str]) -> Iterator[str]:
    for name, attribute in attributes.items():
        if attribute.type not in PLUGIN_ATTRIBUTES:
            yield f"attribute {name}: the parser passes integers, floats and strings only"
        if attribute.type == onnx.AttributeProto.INT and not -(2**31) <= attribute.i < 2**31:
            yield f"attribute {name}: {attribute.i} does not fit 32 bits"
    for index, found in enumerate(types):
        if found in ("UINT8", "BOOL"):
            yield f"input {index} is {found}, which no plugin tensor can be"
        if found != PLUGIN_TYPES.get(index, found):
            yield f"input {index} is {found}"
    if len(set(types[:3])) > 1:
        yield f"qkv and norms of {types[:3]}"


def _is_positive(tensor: TensorProto) -> bool:
    return bool((numpy_helper.to_array(tensor).astype("float32") > 0).all())
