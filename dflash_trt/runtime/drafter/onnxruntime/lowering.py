# SPDX-License-Identifier: Apache-2.0
"""Makes the graphs executable by ONNX Runtime on a CPU, without changing what they compute.

The files on disk are TensorRT's. The CPU provider of onnxruntime 1.31 has no BFLOAT16 MatMul, no FP4 and no plugin, so
activations are widened to FLOAT, quantised values are computed by standard ops, and the plugin node is `_C`'s operator
of its name or, where a session has none, a model-local function: added here, because onnx-tensorrt versions differ on
whether a function or a registered plugin wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.inliner
from onnx import TensorProto, helper

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.graph.onnx_builder import COMPUTE
from dflash_trt.runtime.drafter.onnxruntime.attention import NUM_INPUTS, WITH_SINKS, attention_function
from dflash_trt.runtime.drafter.onnxruntime.dequantize import lower_quantization

HALF_TYPES = (TensorProto.BFLOAT16, TensorProto.FLOAT16)


def lower_to_cpu(
    model: onnx.ModelProto, expose: Sequence[str] = (), *, keep_attention: bool = False
) -> onnx.ModelProto:
    """A copy of `model` with FLOAT activations and every node defined; `expose` names values to return as well.

    With `keep_attention` the attention nodes stay, for a session that has `_C`'s operator of their name.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    lowered.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in expose)
    lower_quantization(lowered)
    _widen(lowered.graph)
    _take_caches(lowered.graph)
    for node in () if keep_attention else lowered.graph.node:
        if node.op_type == ATTENTION and len(node.input) > NUM_INPUTS:
            node.op_type = WITH_SINKS
    used = {node.op_type for node in lowered.graph.node}
    for name, with_sinks in ((ATTENTION, False), (WITH_SINKS, True)):
        if name in used and not keep_attention:
            lowered.functions.append(attention_function(with_sinks=with_sinks))
    # onnxruntime 1.31 would infer shapes inside a function before its attributes are bound, and read them as 0.
    return onnx.inliner.inline_local_functions(lowered)


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
