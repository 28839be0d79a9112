# SPDX-License-Identifier: Apache-2.0
"""context.onnx, the KV injection: target features become every draft layer's context K and V."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graph.layers import gathered, normalize, rms_norm, rotary_order, rotary_rows, scale, times
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

        norms = [g.weight(f"layers.{i}.self_attn.k_norm.weight") for i in range(L)]  # L x [D]
        stacked = g.reshape(g.op("Concat", *norms, axis=0), [L, 1, D])
        k = scale(g, normalize(g, k, spec.rms_norm_eps), stacked)
        k = _rotate(g, gathered(g, k, rotary_order(spec)), *rotary_rows(g, positions, spec), D)

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
    """All layers' k and v [T, L*G*D] of h [T, H]: in one GEMM, or a GEMM a layer where each norms h in its own way."""
    L, width = len(spec.layers), spec.num_key_value_heads * spec.head_dim
    if not spec.context_input_layernorm:
        return g.split(linear(g, h, *spec.context_modules()), [L * width, L * width])
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


def _rotate(g: GraphBuilder, k: str, cos: str, sin: str, head_dim: int) -> str:
    """Rotate-half of k [T, L, G, D] by rows cos, sin [T, D/2], in FLOAT."""
    cos, sin = (g.op("Unsqueeze", x, g.constant([1, 2])) for x in (cos, sin))  # [T, 1, 1, D/2]
    x, y = g.split(g.op("Cast", k, to=TensorProto.FLOAT), [head_dim // 2, head_dim // 2])
    low = g.op("Sub", g.op("Mul", x, cos), g.op("Mul", y, sin))
    high = g.op("Add", g.op("Mul", y, cos), g.op("Mul", x, sin))
    return g.op("Cast", g.op("Concat", low, high, axis=-1), to=COMPUTE)
