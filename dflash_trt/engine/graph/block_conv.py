# SPDX-License-Identifier: Apache-2.0
"""DFlash2's grouped dynamic convolution: each row of a block mixes with the rows before it.

    out[s] = sum over taps i <= s of (base[i] + change[s, i]) * x[s - i]

`change` has one value for each group of channels, and comes from the sublayer's input, for both of its sides. As in
z-lab's dflash 0.1.0 (GroupedDynamicCausalConv) and vLLM 0.33, sums are FP32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graph.linear import linear
from dflash_trt.engine.graph.onnx_builder import COMPUTE, GraphBuilder


def convolved(g: GraphBuilder, x: str, name: str, spec: DraftSpec, sublayer: Callable[[str], str]) -> str:
    """`sublayer` of x [B*S, H] between the two sides of the convolution `name`; without convolutions, of x alone."""
    if (conv := spec.block_conv) is None:
        return sublayer(x)
    H, taps = spec.hidden_size, conv.kernel_size
    with g.scope(name):
        half = taps * (H // conv.group_size)
        changes = g.split(linear(g, x, f"{name}.kernel_projection"), [half, half])
        kernel = g.op("Cast", g.weight(f"{name}.base_kernel"), to=TensorProto.FLOAT)  # [2, taps, H]
        sides = [g.op("Gather", kernel, g.constant(side), axis=0) for side in (0, 1)]
        before = _convolution(g, x, changes[0], sides[0], spec)
    output = sublayer(before)
    with g.scope(name):
        return _convolution(g, output, changes[1], sides[1], spec)


def _convolution(g: GraphBuilder, x: str, change: str, base: str, spec: DraftSpec) -> str:
    """One side: x [B*S, H], change [B*S, taps*H/group], base [taps, H] FLOAT -> [B*S, H]."""
    assert spec.block_conv is not None
    S, H, taps, width = spec.block_size, spec.hidden_size, spec.block_conv.kernel_size, spec.block_conv.group_size
    rows = g.reshape(g.op("Cast", x, to=TensorProto.FLOAT), [-1, S, H // width, width])
    change = g.reshape(g.op("Cast", change, to=TensorProto.FLOAT), [-1, S, taps, H // width, 1])
    base = g.reshape(base, [taps, H // width, width])
    total = ""
    for tap in range(min(taps, S)):
        coefficient = g.op(
            "Add", g.op("Gather", base, g.constant(tap), axis=0), g.op("Gather", change, g.constant(tap), axis=2)
        )
        term = g.op("Mul", coefficient, _delayed(g, rows, tap, S))
        total = g.op("Add", total, term) if total else term
    return g.reshape(g.op("Cast", total, to=COMPUTE), [-1, H])


def _delayed(g: GraphBuilder, rows: str, tap: int, S: int) -> str:
    """rows [B, S, G, g] moved back by `tap` slots: a block begins with zeros, never with another block's rows."""
    if tap == 0:
        return rows
    rows_before = g.op("Slice", rows, g.constant([0]), g.constant([S - tap]), g.constant([1]))
    return g.op("Pad", rows_before, g.constant([0, tap, 0, 0, 0, 0, 0, 0]))
