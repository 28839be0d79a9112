# SPDX-License-Identifier: Apache-2.0
"""FP4 and FP8 in standard ops: the same numbers, bit for bit; each Q/DQ node calls a model-local function."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.quantization import BLOCK
from dflash_trt.graph.onnx_builder import OPSET, TRT_DOMAIN
from dflash_trt.graph.pruning import prune

DOMAIN = "dflash_trt.cpu"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # code points of FP4 by their low three bits; bit 3 is the sign
CODE_PAIRS = "fp4_code_pairs"

# ONNX text syntax; `to: int = 1` is FLOAT, 17 FLOAT8E4M3FN, 6 INT32.
FUNCTIONS = (
    """
Dequantize (x, scale) => (y)  # FP8 codes times a scale that broadcasts
{
    values = Cast <to: int = 1> (x)
    y = Mul (values, scale)
}
""",
    """
Quantize (x, scale) => (y)  # FP8 codes, to nearest even, saturating at 448
{
    values = Div (x, scale)
    y = Cast <to: int = 17, saturate: int = 1> (values)
}
""",
    """
DequantizeBlocks (x, scales) => (y)  # x [.., K] by scales [.., K / 16]
{
    shape = Shape (x)
    blocks_shape = Constant <value_ints: ints = [-1, 16]> ()
    blocks = Reshape (x, blocks_shape)
    column_shape = Constant <value_ints: ints = [-1, 1]> ()
    column = Reshape (scales, column_shape)
    scaled = Mul (blocks, column)
    y = Reshape (scaled, shape)
}
""",
    """
UnpackFp4 (bytes, pairs) => (y)  # UINT8 [R, K / 2] -> FLOAT [R, K], low nibble first
{
    indices = Cast <to: int = 6> (bytes)
    values = Gather <axis: int = 0> (pairs, indices)
    shape = Constant <value_ints: ints = [0, -1]> ()
    y = Reshape (values, shape)
}
""",
    """
QuantizeFp4Blocks (x, scale) => (codes, block_scales)  # dynamic NVFP4: codes FLOAT like x, scales FP8 [.., K / 16]
{
    shape = Shape (x)
    blocks_shape = Constant <value_ints: ints = [-1, 16]> ()
    blocks = Reshape (x, blocks_shape)
    size = Abs (blocks)
    last = Constant <value_ints: ints = [-1]> ()
    largest = ReduceMax <keepdims: int = 1> (size, last)
    six = Constant <value_float: float = 6.0> ()
    six_scale = Mul (six, scale)
    ratio = Div (largest, six_scale)
    rounded = Cast <to: int = 17, saturate: int = 1> (ratio)
    block_scale = Cast <to: int = 1> (rounded)
    unit = Mul (block_scale, scale)
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_float: float = 1.0> ()
    empty = Equal (unit, zero)
    divisor = Where (empty, one, unit)
    quotient = Div (size, divisor)
    nothing = Mul (quotient, zero)
    present = Where (empty, nothing, quotient)
    bounded = Min (present, six)
    two = Constant <value_float: float = 2.0> ()
    four = Constant <value_float: float = 4.0> ()
    half = Constant <value_float: float = 0.5> ()
    below_two = Less (bounded, two)
    below_four = Less (bounded, four)
    upper_step = Where (below_four, one, two)
    step = Where (below_two, half, upper_step)
    counts = Div (bounded, step)
    whole = Round (counts)
    magnitude = Mul (whole, step)
    sign = Sign (blocks)
    signed = Mul (magnitude, sign)
    codes = Reshape (signed, shape)
    start = Constant <value_ints: ints = [0]> ()
    end = Constant <value_ints: ints = [-1]> ()
    leading = Slice (shape, start, end)
    scales_shape = Concat <axis: int = 0> (leading, end)
    shaped = Reshape (block_scale, scales_shape)
    block_scales = Cast <to: int = 17> (shaped)
}
""",
)


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
    model.functions.extend(map(_function, FUNCTIONS))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    for imported in [i for i in model.opset_import if i.domain == TRT_DOMAIN]:
        model.opset_import.remove(imported)


def _function(body: str) -> onnx.FunctionProto:
    return onnx.parser.parse_function(f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">' + _without_comment(body))


def _without_comment(body: str) -> str:
    head, _, rest = body.partition("\n{")
    return head.partition("  #")[0] + "\n{" + rest


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
