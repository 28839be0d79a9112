# SPDX-License-Identifier: Apache-2.0
"""Layers of both graphs. Shape letters: ... leading axes, H hidden, F MLP width, D head_dim.

Rows of the draft graph are padded to a multiple of 128, because TensorRT reads the scales of an NVFP4 activation in
tiles of 128 rows. With a multiple of 128 rows TensorRT fuses quantise + swizzle; otherwise every GEMM gets a second
kernel. Rows are padded once at the start and dropped at the end. They do not interact, or only within a block, and
attention reads and writes only those of the block, so the contents of padding rows do not matter. Ranks that share a
drafter pad their rows alike, and sum only the block's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graph.linear import linear, partial_linear
from dflash_trt.engine.graph.onnx_builder import COMPUTE, GraphBuilder, prune
from dflash_trt.engine.signatures import TILE_ROWS

ROPE_STRIDE = 256


def normalize(g: GraphBuilder, x: str, eps: float) -> str:
    """x / sqrt(mean(x^2) + eps) over the last axis, in FLOAT."""
    x = g.op("Cast", x, to=TensorProto.FLOAT)
    return g.op("Div", x, root_mean_square(g, x, eps))


def root_mean_square(g: GraphBuilder, x: str, eps: float) -> str:
    """sqrt(mean(x^2) + eps) of x FLOAT over the last axis, which is kept with size 1."""
    mean_square = g.op("ReduceMean", g.op("Mul", x, x), g.constant([-1]), keepdims=1)
    return g.op("Sqrt", g.op("Add", mean_square, g.constant(eps)))


def scale(g: GraphBuilder, x: str, weight: str) -> str:
    """x * weight in FLOAT, then back to the compute dtype: the second half of RMSNorm."""
    return g.op("Cast", g.op("Mul", x, g.op("Cast", weight, to=TensorProto.FLOAT)), to=COMPUTE)


def times(g: GraphBuilder, x: str, factor: float | NDArray[np.float32]) -> str:
    """x multiplied by a constant in the compute dtype: one number, or one for each of the last axis."""
    return x if np.all(factor == 1) else g.op("Mul", x, g.op("Cast", g.constant(factor), to=COMPUTE))


def gathered(g: GraphBuilder, x: str, order: NDArray[np.int64]) -> str:
    """x with its last axis permuted: element i comes from order[i]."""
    return x if np.array_equal(order, np.arange(len(order))) else g.op("Gather", x, g.constant(order), axis=-1)


def rms_norm(g: GraphBuilder, x: str, name: str, eps: float) -> str:
    """RMSNorm of x [..., H] with `NAME.weight` [H], computed in FLOAT."""
    with g.scope(name):
        return scale(g, normalize(g, x, eps), g.weight(f"{name}.weight"))


def rotary_order(spec: DraftSpec) -> NDArray[np.int64]:
    """The dimensions [D] of a head in an order for which rotate-half over the whole head rotates the right pairs.

    Order: first of each rotary pair, half of the pass-through dims, second of each pair, the other half. Angles of the
    pass-through dims are 0 (`rotary_rows`). Pairs are (i, i + R/2), or interleaved (2i, 2i + 1).
    """
    D, R = spec.head_dim, spec.rope.rotary_dim(spec.head_dim)
    turning, third, last = np.split(np.arange(D), [R, (R + D) // 2])
    first, second = turning.reshape(-1, 2).T if spec.rope.interleaved else np.split(turning, 2)
    return np.concatenate([first, third, second, last])


def swiglu(g: GraphBuilder, x: str, mlp: str, width: int) -> str:
    """down(silu(gate(x)) * up(x)) of x [rows, H], gate and up in one GEMM."""
    with g.scope(mlp):
        gate_up = linear(g, x, f"{mlp}.gate_proj", f"{mlp}.up_proj")
        gate, up = g.split(gate_up, [width, width])
        activated = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        # After a Split no extent is static to TensorRT's parser, but NVFP4 needs a static one along its blocks.
        return partial_linear(g, g.reshape(activated, [-1, width]), f"{mlp}.down_proj")


def rotary_rows(g: GraphBuilder, positions: str, spec: DraftSpec) -> tuple[str, str]:
    """cos and sin [..., D/2] FLOAT of positions [...] INT32, times YaRN's attention factor; 1 and 0 for pass-through
    dims.

    Exact at any position without a large table: with p = 256 a + b, cos(p w) = cos(256 a w) cos(b w) - sin(256 a w)
    sin(b w), and both small tables come from float64.
    """
    frequencies = spec.rope.inverse_frequencies(spec.head_dim)
    still = spec.head_dim // 2 - len(frequencies)
    factor = np.repeat([spec.rope.attention_factor, 1.0], [len(frequencies), still])
    frequencies = np.pad(frequencies, (0, still))
    coarse_rows = math.ceil((spec.max_position_embeddings + spec.block_size) / ROPE_STRIDE)
    coarse_angles = np.outer(np.arange(coarse_rows) * ROPE_STRIDE, frequencies)
    fine_angles = np.outer(np.arange(ROPE_STRIDE), frequencies)

    def rows(table: np.ndarray[tuple[int, int], np.dtype[np.float64]], index: str) -> str:
        return g.op("Gather", g.constant(table.astype(np.float32)), index, axis=0)

    with g.scope("rope"):
        stride = g.constant(np.array(ROPE_STRIDE, dtype=np.int32))
        a = g.op("Div", positions, stride)
        b = g.op("Sub", positions, g.op("Mul", a, stride))
        cos_a, sin_a = rows(np.cos(coarse_angles), a), rows(np.sin(coarse_angles), a)
        cos_b, sin_b = rows(np.cos(fine_angles) * factor, b), rows(np.sin(fine_angles) * factor, b)
        cos = g.op("Sub", g.op("Mul", cos_a, cos_b), g.op("Mul", sin_a, sin_b))
        sin = g.op("Add", g.op("Mul", sin_a, cos_b), g.op("Mul", cos_a, sin_b))
        return cos, sin


def convolved(g: GraphBuilder, x: str, name: str, spec: DraftSpec, sublayer: Callable[[str], str]) -> str:
    """`sublayer` of x [B*S, H] between the two sides of the convolution `name`; without convolutions, just `sublayer`
    of x.
    """
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
    """rows [B, S, G, g] shifted by `tap` slots: a block begins with zeros, never with another block's rows."""
    if tap == 0:
        return rows
    rows_before = g.op("Slice", rows, g.constant([0]), g.constant([S - tap]), g.constant([1]))
    return g.op("Pad", rows_before, g.constant([0, tap, 0, 0, 0, 0, 0, 0]))


SCOPE = "padding"


def pad_rows(g: GraphBuilder, x: str) -> tuple[str, str]:
    """x [R, H] padded with zeros to a multiple of TILE_ROWS rows, and R as INT64 [1]."""
    with g.scope(SCOPE):
        rows = g.op("Gather", g.op("Shape", x), g.constant([0]), axis=0)
        tiles = g.op("Div", g.op("Add", rows, g.constant([TILE_ROWS - 1])), g.constant([TILE_ROWS]))
        more = g.op("Sub", g.op("Mul", tiles, g.constant([TILE_ROWS])), rows)
        return g.op("Pad", x, g.op("Concat", g.constant([0, 0]), more, g.constant([0]), axis=0)), rows


def unpad_rows(g: GraphBuilder, x: str, rows: str) -> str:
    """The first `rows` rows of x."""
    with g.scope(SCOPE):
        return g.op("Slice", x, g.constant([0]), rows, g.constant([0]))


def leave_out_padding(graph: onnx.GraphProto) -> None:
    """Removes the padding from a graph, for executors that compute every row."""
    for node in graph.node:
        if node.op_type in ("Pad", "Slice") and node.name.startswith(f"{SCOPE}/"):
            node.op_type = "Identity"
            del node.input[1:]
    prune(graph)
