# SPDX-License-Identifier: Apache-2.0
"""FP4 and FP8 in standard ops: the same numbers, bit for bit; each Q/DQ node calls a model-local function."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.quantization import BLOCK
from dflash_trt.engine.graph.onnx_builder import OPSET, TRT_DOMAIN, prune
from dflash_trt.runtime.drafter.onnxruntime.attention import function_text

DOMAIN = "dflash_trt.runtime.cpu"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code points of FP4 by their low three bits; bit 3 is the sign
CODE_PAIRS = "fp4_code_pairs"


def lower_quantization(model: onnx.ModelProto) -> None:
    """Rewrites every FP4 and FP8 node of `model` in place; a model without them stays as it is."""
    quantised = {"DequantizeLinear", "QuantizeLinear", "TRT_FP4DynamicQuantize"}
    graph = model.graph
    has_fp8_cache = any(value.type.tensor_type.elem_type == TensorProto.FLOAT8E4M3FN for value in graph.input)
    if not has_fp8_cache and not any(node.op_type in quantised for node in graph.node):
        return
    packed = _unpack_weights(graph)
    nodes = [*packed, *(_lowered(node) for node in graph.node)]
    _widen_cache(graph, nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph)  # of zero points, which the functions do without
    text = function_text("dequantize", opset=OPSET, domain=DOMAIN)
    model.functions.extend(map(onnx.parser.parse_function, text.strip().split("\n\n")[1:]))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    for imported in [i for i in model.opset_import if i.domain == TRT_DOMAIN]:
        model.opset_import.remove(imported)


def _lowered(node: onnx.NodeProto) -> onnx.NodeProto:
    attributes = {attribute.name for attribute in node.attribute}
    match node.op_type:
        case "DequantizeLinear":
            operation = "DequantizeBlocks" if "block_size" in attributes else "Dequantize"
        case "QuantizeLinear":
            operation = "Quantize"
        case "TRT_FP4DynamicQuantize":
            operation = "QuantizeFp4Blocks"
        case _:
            return node
    return helper.make_node(operation, node.input[:2], node.output, name=node.name, domain=DOMAIN)


def _unpack_weights(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """FP4 initializers become bytes, and nodes that look their codes up; readers then see FLOAT codes."""
    nodes = []
    for initializer in graph.initializer:
        if initializer.data_type != TensorProto.FLOAT4E2M1:
            continue
        name = initializer.name
        initializer.name = f"{name}/bytes"
        initializer.data_type = TensorProto.UINT8
        initializer.dims[-1] //= 2
        nodes.append(helper.make_node("UnpackFp4", [initializer.name, CODE_PAIRS], [name], domain=DOMAIN))
    if nodes:
        values = np.array([*E2M1, *(-value for value in E2M1)], dtype=np.float32)
        pairs = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)  # [256, 2]: low nibble, high nibble
        graph.initializer.append(numpy_helper.from_array(pairs, CODE_PAIRS))
    return nodes


def _widen_cache(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """An FP8 context cache is held as FLOAT: rounded to FP8 and back on its way in, then read as it is."""
    fp8 = TensorProto.FLOAT8E4M3FN
    for value in graph.input:
        if value.type.tensor_type.elem_type == fp8:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    producers = {output: node for node in nodes for output in node.output}
    for value in graph.output:
        if value.type.tensor_type.elem_type != fp8:
            continue
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        quantize = producers[value.name]
        division = producers[quantize.input[0]]
        quantize.output[0] = f"{value.name}/codes"
        nodes.append(
            helper.make_node("Dequantize", [quantize.output[0], division.input[1]], [value.name], domain=DOMAIN)
        )


assert BLOCK == 16, "the function bodies above spell it out"
