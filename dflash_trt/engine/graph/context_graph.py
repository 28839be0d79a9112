# SPDX-License-Identifier: Apache-2.0
"""context.onnx, the KV injection: target features become every draft layer's context K and V."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graph.layers import (
    gathered,
    normalize,
    rms_norm,
    root_mean_square,
    rotary_order,
    rotary_rows,
    scale,
    times,
)
from dflash_trt.engine.graph.linear import linear
from dflash_trt.engine.graph.onnx_builder import COMPUTE, GraphBuilder, rounded


def context_graph(draft: DraftCheckpoint) -> onnx.ModelProto:
    """target_hidden [T, A*H], positions [T] -> k, v [T, L, G, D], as `graph_signatures` has them.

    fc -> hidden_norm -> one GEMM for all layers' K and V -> k_norm -> RoPE on k (DFlash, arXiv 2602.06036, section 3.2;
    order as in z-lab/dflash model.py). k has its dimensions in `rotary_order`.
    """
    spec = draft.spec
    L, G, D = len(spec.layers), spec.num_key_value_heads, spec.head_dim
    g = GraphBuilder("context", draft)
    target_hidden = g.input("target_hidden")
    positions = g.input("positions")

    if spec.tap_norms:
        target_hidden = _norm_taps(g, target_hidden, spec)
    h = rms_norm(g, linear(g, target_hidden, "fc"), "hidden_norm", spec.rms_norm_eps)  # [T, H]
    with g.scope("kv_injection"):
        k, v = _keys_values(g, h, spec)
        k, v = (g.reshape(x, [-1, L, G, D]) for x in (k, v))
        v = times(g, v, spec.value_scale)

        k = _norm_and_rotate(g, k, positions, spec)

    if draft.quantization.fp8_kv_cache:
        k, v = (_to_fp8(g, x, draft.cache_scales(name), name) for x, name in ((k, "k"), (v, "v")))
    g.output(k, "k")
    g.output(v, "v")
    return g.model()


def _norm_taps(g: GraphBuilder, taps: str, spec: DraftSpec) -> str:
    """An RMSNorm with its own weight on each tap of taps [T, A*H], as laguna_dflash.py of vLLM 0.32."""
    A = len(spec.target_layer_ids)
    H = spec.target_hidden_size // A
    with g.scope("aux_hidden_norms"):
        weights = g.op("Concat", *(g.weight(f"aux_hidden_norms.{tap}.weight") for tap in range(A)), axis=0)
        rows = normalize(g, g.reshape(taps, [-1, A, H]), spec.rms_norm_eps)
        return g.reshape(scale(g, rows, g.reshape(weights, [A, H])), [-1, A * H])


def _keys_values(g: GraphBuilder, h: str, spec: DraftSpec) -> list[str]:
    """All layers' k and v of h [T, H], L*G*D values a row: in one GEMM, or one a layer where each norms h."""
    L, width = len(spec.layers), spec.num_key_value_heads * spec.head_dim
    if not spec.context_input_layernorm:
        kv = g.reshape(linear(g, h, *spec.context_modules()), [-1, 2, L * width])
        # In the order they have: TensorRT-RTX's builder writes k and v in one kernel where they share an operation that
        # it cannot move into the GEMM; of a mere Split it makes a copy of v.
        kv = g.op("Gather", kv, g.constant([0, 1]), axis=1)
        return g.ops("Split", (kv, g.constant([1, 1])), num_outputs=2, axis=1)
    normed = normalize(g, h, spec.rms_norm_eps)
    pairs = []
    for i, attention in enumerate(spec.attention_modules()):
        rows = scale(g, normed, g.weight(f"layers.{i}.input_layernorm.weight"))
        pairs.append(g.split(linear(g, rows, f"{attention}.k_proj", f"{attention}.v_proj"), [width, width]))
    return [g.op("Concat", *kv, axis=-1) for kv in zip(*pairs, strict=True)]


def _to_fp8(g: GraphBuilder, x: str, scales: tuple[float, ...], name: str) -> str:
    """x [T, L, G, D] as cache rows in FP8 E4M3, one scale a layer.

    TensorRT quantises activations by a single scale (NvInfer.h 11.1, IQuantizeLayer), so the layers' are divided by.
    """
    divisors = np.array([rounded(scale) for scale in scales], dtype=np.float32).reshape(-1, 1, 1)
    x = g.op("Div", g.op("Cast", x, to=TensorProto.FLOAT), g.constant(divisors))
    return g.named("QuantizeLinear", x, g.constant(1.0), g.zero(TensorProto.FLOAT8E4M3FN), name=name)


def _norm_and_rotate(g: GraphBuilder, k: str, positions: str, spec: DraftSpec) -> str:
    """k_norm and RoPE of k [T, L, G, D], in FLOAT.

    Rotated, then divided: the norm is one number a head, and the rotation linear. In this order TensorRT-RTX's builder
    makes one kernel of it all; a rotation of what a reduction has scaled is a second one, by way of FLOAT in memory.
    """
    L, D = len(spec.layers), spec.head_dim
    norms = [g.weight(f"layers.{i}.self_attn.k_norm.weight") for i in range(L)]  # L x [D]
    weights = g.op("Cast", g.reshape(g.op("Concat", *norms, axis=0), [L, 1, D]), to=TensorProto.FLOAT)
    k = g.op("Cast", k, to=TensorProto.FLOAT)
    rows = gathered(g, g.op("Mul", k, weights), rotary_order(spec))
    rotated = _rotate(g, rows, *rotary_rows(g, positions, spec), D)
    return g.op("Cast", g.op("Div", rotated, root_mean_square(g, k, spec.rms_norm_eps)), to=COMPUTE)


def _rotate(g: GraphBuilder, k: str, cos: str, sin: str, head_dim: int) -> str:
    """Rotate-half of k [T, L, G, D] by rows cos, sin [T, D/2], all in FLOAT."""
    cos, sin = (g.op("Unsqueeze", x, g.constant([1, 2])) for x in (cos, sin))  # [T, 1, 1, D/2]
    x, y = g.split(k, [head_dim // 2, head_dim // 2])
    low = g.op("Sub", g.op("Mul", x, cos), g.op("Mul", y, sin))
    high = g.op("Add", g.op("Mul", y, cos), g.op("Mul", x, sin))
    return g.op("Concat", low, high, axis=-1)
