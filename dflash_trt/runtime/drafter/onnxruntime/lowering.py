# SPDX-License-Identifier: Apache-2.0
"""Makes the graphs executable by ONNX Runtime on a CPU, without changing what they compute.

The files on disk are TensorRT's. The CPU provider of onnxruntime 1.31 has no BFLOAT16 MatMul, no FP4 and no plugin, so
activations are widened to FLOAT, quantised values are computed by standard ops, and the plugin node is `_C`'s operator
of its name (`cpp/onnxruntime/attention_op.cpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.number_formats import BLOCK, INT4_BLOCK
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.graph.layers import leave_out_padding
from dflash_trt.engine.graph.onnx_builder import COMPUTE, OPSET, TRT_DOMAIN, prune
from dflash_trt.errors import EngineError
from dflash_trt.files.read import read_text

MAX_BYTES = 2**16
QKV_BIAS = 9
"""Place of the bias among the attention node's inputs, if it is there."""


def function_text(file: str, /, **values: object) -> str:
    """FILE.onnxtxt in this folder, in ONNX's text syntax, with `values` substituted for their names."""
    text = read_text(Path(__file__).with_name(f"{file}.onnxtxt"), EngineError, limit=MAX_BYTES)
    return Template(text).substitute(values)


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
    int4 = {initializer.name for initializer in graph.initializer if initializer.data_type == TensorProto.INT4}
    nodes = [*packed, *(_lowered(node, int4) for node in graph.node)]
    _widen_cache(graph, nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph)  # removes zero points, which the functions do not take
    text = function_text("dequantize", opset=OPSET, domain=DOMAIN)
    model.functions.extend(map(onnx.parser.parse_function, text.strip().split("\n\n")[1:]))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    for imported in [i for i in model.opset_import if i.domain == TRT_DOMAIN]:
        model.opset_import.remove(imported)


def _lowered(node: onnx.NodeProto, int4: set[str]) -> onnx.NodeProto:
    """`node` in standard operators; `int4` are the initializers of that type."""
    attributes = {attribute.name for attribute in node.attribute}
    match node.op_type:
        case "DequantizeLinear" if node.input[0] in int4:
            # Not as it stands: findings/onnxruntime_computes_int4_weights_with_int8_activations.sh
            operation = "DequantizePairs"
        case "Cast" if node.input[0].endswith(".weight_scale"):  # INT4's FLOAT scales, COMPUTE to TensorRT
            return helper.make_node("Round", node.input, node.output, name=node.name, domain=DOMAIN)
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


assert (BLOCK, INT4_BLOCK) == (16, 32), "dequantize.onnxtxt spells them out"


HALF_TYPES = (TensorProto.BFLOAT16, TensorProto.FLOAT16)


def lower_to_cpu(model: onnx.ModelProto, expose: Sequence[str] = ()) -> onnx.ModelProto:
    """A copy of `model` with FLOAT activations, for a session that has `_C`'s operators; `expose` names values to
    return as well.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    lowered.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in expose)
    leave_out_padding(lowered.graph)
    _attend_alone(lowered.graph)
    lower_quantization(lowered)
    _widen(lowered.graph)
    _take_caches(lowered.graph)
    # onnxruntime 1.31 would infer shapes inside a function before its attributes are bound, and read them as 0.
    # Attributes have no defaults: findings/onnx_inliner_drops_the_defaults_of_attributes.sh
    return onnx.inliner.inline_local_functions(lowered)


def _attend_alone(graph: onnx.GraphProto) -> None:
    """Bias and FP8 output of the attention node as nodes of their own: `_C`'s operator has neither."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if values.get("has_qkv_bias"):
            nodes.append(helper.make_node("Add", [node.input[0], node.input[QKV_BIAS]], [f"{node.name}/qkv"]))
            node.input[0] = f"{node.name}/qkv"
            del node.input[QKV_BIAS]
        nodes.append(node)
        if values.get("fp8_output"):
            (output,) = node.output
            scale = np.array(values["output_scale"], dtype=np.float32)
            graph.initializer.append(numpy_helper.from_array(scale, f"{node.name}/output_scale"))
            node.output[0] = f"{node.name}/output"
            nodes.append(helper.make_node("QuantizeLinear", [node.output[0], f"{node.name}/output_scale"], [output]))
    del graph.node[:]
    graph.node.extend(nodes)


def _take_caches(graph: onnx.GraphProto) -> None:
    """Replaces pointers and page table with k_cache, v_cache [pages, L, rows, G, D] and page_ids [B, M].

    ONNX Runtime's standard operators follow no pointers.
    """
    replaced = {"context_pointers": "k_cache", "context_layout": "v_cache", "slot_ids": "page_ids"}
    attributes = [{a.name: a.i for a in node.attribute} for node in graph.node if node.op_type == ATTENTION]
    pointers = (value.type.tensor_type for value in graph.input if value.name == "context_pointers")
    num_layers = next((value.shape.dim[0].dim_value for value in pointers), 0)
    inputs = [value for value in graph.input if value.name != "page_table"]
    for value in inputs:
        if value.name == "slot_ids":
            value.CopyFrom(helper.make_tensor_value_info("page_ids", TensorProto.INT32, ("B", "M")))
        elif value.name in replaced:
            heads, width = attributes[0]["num_kv_heads"], attributes[0]["head_dim"]
            shape = ("P", num_layers, "R", heads, width)
            value.CopyFrom(helper.make_tensor_value_info(replaced[value.name], TensorProto.FLOAT, shape))
    del graph.input[:]
    graph.input.extend(inputs)
    for node in graph.node:
        if node.op_type == ATTENTION:
            node.input[:] = [replaced.get(name, name) for name in node.input if name != "page_table"]


def _widen(graph: onnx.GraphProto) -> None:
    """BFLOAT16 inputs, outputs and casts become FLOAT; onnxruntime folds the casts of half-width initializers."""
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type == COMPUTE:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == COMPUTE:
                attribute.i = TensorProto.FLOAT
    half = {i.name for i in graph.initializer if i.data_type in HALF_TYPES}
    for node in graph.node:
        node.input[:] = [f"{name}/float" if name in half else name for name in node.input]
    casts = [helper.make_node("Cast", [name], [f"{name}/float"], to=TensorProto.FLOAT) for name in sorted(half)]
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
