# SPDX-License-Identifier: Apache-2.0
"""Linear layers of several nodes that are one product: with a bias, or of quantised numbers that a device multiplies.

Where a device has no product of quantised numbers, weights are dequantised to BF16 once, as the nodes prescribe. A
further number format is one more function here. FP8's product has run on an H100, FP4's has **not yet run**.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.checkpoint.number_formats import BLOCK
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.plans.machine import LOWEST_SM
from dflash_trt.runtime.drafter.torch.calls import Call
from dflash_trt.runtime.drafter.torch.onnx_graph import Node, OnnxGraph, Pattern, packed_name
from dflash_trt.runtime.drafter.torch.operators import fp4_scales, fp4_values

SCALE_ROWS, SCALE_COLUMNS = 128, 4
"""Extents that a tensor core reads FP4's block scales in."""


def patterns(device: torch.device) -> list[Pattern]:
    """The patterns whose product `device` has; a CPU has FP8's, exact in FLOAT."""
    if device.type == "cpu":
        return [biased_linear, fp8_linear]
    capability = torch.cuda.get_device_capability(device)
    products = {"FP8": fp8_linear, "FP4": fp4_linear}
    return [biased_linear, *(pattern for kind, pattern in products.items() if capability >= LOWEST_SM[kind])]


def biased_linear(graph: OnnxGraph, node: Node) -> list[Call] | None:
    """Gemm with a dense matrix, and the bias after it that only the attention reads: else a kernel of its own."""
    product = graph.producer(node.inputs[0], "Gemm") if node.op_type == "Add" else None
    if product is None or product.attributes != {"transB": 1} or node.inputs[1] not in graph.constants:
        return None
    inputs = (*product.inputs, node.inputs[1])
    readers = [reader.op_type for reader in graph.nodes if node.outputs[0] in reader.inputs]
    if product.inputs[1] not in graph.constants or readers != [ATTENTION]:
        return None
    return [Call(F.linear, inputs, node.outputs)]


def fp8_linear(graph: OnnxGraph, node: Node) -> list[Call] | None:
    """Gemm of the output of QuantizeLinear or of the attention node with an FP8 matrix, one FLOAT scale each."""
    if node.op_type != "Gemm":
        return None
    x, weight = (graph.producer(name, "DequantizeLinear") for name in node.inputs[:2])
    made_by = x and graph.producers.get(x.inputs[0])
    if x is None or weight is None or made_by is None or made_by.op_type not in ("QuantizeLinear", ATTENTION):
        return None
    codes, scales = graph.constants.get(weight.inputs[0]), (x.inputs[1], weight.inputs[1])
    if codes is None or codes.dtype != torch.float8_e4m3fn or any(extent % 16 for extent in codes.shape):
        return None
    values = [graph.constants.get(scale) for scale in scales]
    if any(value is None or value.numel() != 1 or value.dtype != torch.float32 for value in values):
        return None
    return [Call(fp8_product, (x.inputs[0], weight.inputs[0], *scales), node.outputs)]


def fp8_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """x [M, K] times weight [N, K], FP8 codes both; BF16 [M, N], rounded once. Scales are FLOAT."""
    if x.is_cuda:
        product: Tensor = torch._scaled_mm(x, weight.T, x_scale, weight_scale, out_dtype=torch.bfloat16)
        return product
    return (F.linear(x.float(), weight.float()) * (x_scale * weight_scale)).bfloat16()


def fp4_linear(graph: OnnxGraph, node: Node) -> list[Call] | None:
    """Gemm of dynamic FP4 with an FP4 matrix, both with FP8 scales of blocks and one of the whole."""
    if node.op_type != "Gemm":
        return None
    casts = [graph.producer(name, "Cast") for name in node.inputs[:2]]
    x, weight = (cast and graph.producer(cast.inputs[0], "DequantizeLinear") for cast in casts)
    quantized = x and graph.producer(x.inputs[0], "TRT_FP4DynamicQuantize")
    scales = weight and graph.producer(weight.inputs[1], "DequantizeLinear")
    if weight is None or quantized is None or scales is None:
        return None
    packed = packed_name(weight.inputs[0])
    if packed not in graph.constants or any(extent % 16 for extent in graph.constants[packed].shape):
        return None
    rows, swizzled = f"{node.name}/fp4", f"{scales.inputs[0]}/swizzled"
    return [
        Call(packed_fp4, quantized.inputs, (rows, f"{rows}/scales"), is_elementwise=True),
        Call(swizzle, (scales.inputs[0],), (swizzled,)),
        Call(fp4_product, (rows, f"{rows}/scales", quantized.inputs[1], packed, swizzled, scales.inputs[1]),
             node.outputs),
    ]  # fmt: skip


def packed_fp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes UINT8 [M, K / 2], low nibble first, and swizzled block scales of x [M, K] in units of `scale`.

    As `quantize_fp4`, but over pairs of values: torch.compile then makes one kernel of scales and codes.
    """
    low, high = x.float().reshape(*x.shape[:-1], -1, BLOCK // 2, 2).unbind(-1)
    scales = fp4_scales(torch.maximum(low.abs(), high.abs()).amax(-1), scale)
    unit = (scales.float() * scale).unsqueeze(-1)
    return (fp4_codes(low, unit) | fp4_codes(high, unit) << 4).flatten(-2), swizzle(scales)


def fp4_codes(x: Tensor, unit: Tensor) -> Tensor:
    """UINT8 codes of x in units of `unit`; bit 3 is the sign."""
    values = fp4_values(x, unit)
    size = values.abs()
    codes = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)) + 8 * (values < 0)
    return codes.to(torch.uint8)


def swizzle(scales: Tensor) -> Tensor:
    """Scales [M, K / 16] FP8 in the order that tensor cores read: tiles of 128 x 4, in which 32 rows lie side by side.

    Rows and columns that fill the last tile are 0 (cuBLAS 13, "1D block scaling factors layout").
    """
    M, columns = scales.shape
    filled = F.pad(scales.float(), (0, -columns % SCALE_COLUMNS, 0, -M % SCALE_ROWS))  # bytes: another kernel
    tiles = filled.reshape(-1, 4, 32, filled.shape[1] // SCALE_COLUMNS, SCALE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).to(torch.float8_e4m3fn).reshape(-1)


def fp4_product(
    x: Tensor, x_scales: Tensor, x_scale: Tensor, weight: Tensor, weight_scales: Tensor, weight_scale: Tensor
) -> Tensor:
    """BF16 [M, N] of packed codes [M, K / 2] and [N, K / 2], swizzled block scales, and FLOAT scales of the whole."""
    kind, recipe, order = torch.float4_e2m1fn_x2, F.ScalingType, F.SwizzleType
    recipes, orders = [recipe.BlockWise1x16, recipe.TensorWise], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]
    product: Tensor = F.scaled_mm(
        x.view(kind), weight.view(kind).T, [x_scales, x_scale], recipes, [weight_scales, weight_scale], recipes,
        swizzle_a=orders, swizzle_b=orders, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return product
