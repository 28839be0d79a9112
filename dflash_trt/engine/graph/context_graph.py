# SPDX-License-Identifier: Apache-2.0
"""context.onnx, the KV injection: target features become every draft layer's context K and V."""

from __future__ import annotations

import itertools

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
from dflash_trt.engine.graph.onnx_builder import COMPUTE, GraphBuilder
from dflash_trt.engine.signatures import CONTEXT_HIDDEN


def context_graph(draft: DraftCheckpoint) -> onnx.ModelProto:
    """target_hidden [T, A*H], positions [T] -> kv [T, 2, L, G, D]: every layer's K, then every layer's V; and with
    LiLiCorr h [T, H] of hidden_norm.

    fc -> hidden_norm -> one GEMM for all layers' K and V -> k_norm -> RoPE on K (DFlash, arXiv 2602.06036, section 3.2;
    order as in z-lab/dflash model.py). K has its dimensions in `rotary_order`.
    """
    spec = draft.spec
    g = GraphBuilder("context", draft)
    target_hidden = g.input("target_hidden")
    positions = g.input("positions")

    if spec.tap_norms:
        target_hidden = _norm_taps(g, target_hidden, spec)
    h = rms_norm(g, linear(g, target_hidden, "fc"), "hidden_norm", spec.rms_norm_eps)  # [T, H]
    with g.scope("kv_injection"):
        kv = g.reshape(_keys_values(g, h, spec), [-1, 2, len(spec.layers), spec.num_key_value_heads, spec.head_dim])
        is_k = g.constant(np.array([True, False]).reshape(2, 1, 1, 1))
        kv = g.op("Where", is_k, _norm_and_rotate(g, kv, positions, spec), times(g, kv, spec.value_scale))
    g.output(_to_fp8(g, kv, draft) if draft.quantization.fp8_kv_cache else kv, "kv")
    if spec.lilicorr is not None:
        g.output(h, CONTEXT_HIDDEN)
    return g.model()


def _norm_taps(g: GraphBuilder, taps: str, spec: DraftSpec) -> str:
    """An RMSNorm with its own weight on each tap of taps [T, A*H], as laguna_dflash.py of vLLM 0.32."""
    A = len(spec.target_layer_ids)
    H = spec.target_hidden_size // A
    with g.scope("aux_hidden_norms"):
        weights = g.op("Concat", *(g.weight(f"aux_hidden_norms.{tap}.weight") for tap in range(A)), axis=0)
        rows = normalize(g, g.reshape(taps, [-1, A, H]), spec.rms_norm_eps)
        return g.reshape(scale(g, rows, g.reshape(weights, [A, H])), [-1, A * H])


def _keys_values(g: GraphBuilder, h: str, spec: DraftSpec) -> str:
    """All layers' K, then V [T, 2*L*G*D] of h [T, H]: in one GEMM, or one GEMM per layer if each layer normalises h
    itself.
    """
    width = spec.num_key_value_heads * spec.head_dim
    if not spec.context_input_layernorm:
        return linear(g, h, *spec.context_modules())
    normed = normalize(g, h, spec.rms_norm_eps)
    pairs = []
    for i, attention in enumerate(spec.attention_modules()):
        rows = scale(g, normed, g.weight(f"layers.{i}.input_layernorm.weight"))
        pairs.append(g.split(linear(g, rows, f"{attention}.k_proj", f"{attention}.v_proj"), [width, width]))
    return g.op("Concat", *itertools.chain(*zip(*pairs, strict=True)), axis=-1)


def _norm_and_rotate(g: GraphBuilder, kv: str, positions: str, spec: DraftSpec) -> str:
    """k_norm and RoPE of kv [T, 2, L, G, D], in FLOAT. V is processed, too, because selecting only K would copy V.

    Rotates first, then divides by the norm, one number per head: TensorRT-RTX's builder fuses this into one kernel, but
    needs two if the rotation follows the division.
    """
    L, D = len(spec.layers), spec.head_dim
    norms = [g.weight(f"layers.{i}.self_attn.k_norm.weight") for i in range(L)]  # L x [D]
    weights = g.op("Cast", g.reshape(g.op("Concat", *norms, axis=0), [L, 1, D]), to=TensorProto.FLOAT)
    kv = g.op("Cast", kv, to=TensorProto.FLOAT)
    rows = gathered(g, g.op("Mul", kv, weights), rotary_order(spec))
    cos, sin = (g.op("Unsqueeze", x, g.constant([1, 2, 3])) for x in rotary_rows(g, positions, spec))  # over D/2
    x, y = g.split(rows, [D // 2, D // 2])
    low = g.op("Sub", g.op("Mul", x, cos), g.op("Mul", y, sin))
    high = g.op("Add", g.op("Mul", y, cos), g.op("Mul", x, sin))
    rotated = g.op("Div", g.op("Concat", low, high, axis=-1), root_mean_square(g, kv, spec.rms_norm_eps))
    return g.op("Cast", rotated, to=COMPUTE)


def _to_fp8(g: GraphBuilder, kv: str, draft: DraftCheckpoint) -> str:
    """kv [T, 2, L, G, D] as cache rows in FP8 E4M3, a scale for each layer's K and V.

    TensorRT quantises activations by a single scale (NvInfer.h 11.1, IQuantizeLayer), so kv is first divided by the
    layers' scales.
    """
    scales = [draft.cache_scales(name) for name in ("k", "v")]
    divisors = g.constant(np.array(scales, dtype=np.float32)[:, :, None, None])
    kv = g.op("Div", g.op("Cast", kv, to=TensorProto.FLOAT), divisors)
    return g.named("QuantizeLinear", kv, g.constant(1.0), g.zero(TensorProto.FLOAT8E4M3FN), name="kv")
