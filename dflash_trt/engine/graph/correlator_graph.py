# SPDX-License-Identifier: Apache-2.0
"""correlator.onnx: LiLiCorr's small transformer over all candidates of a block, whose cosines score the edges.

Each of the K * k candidates attends to all others. Afterwards it has two unit vectors, outgoing and incoming, and the
score of candidate b after candidate a is scale * out[a] . in[b]; the last verified token's outgoing vector starts the
path. The head's logits enter as features and are not added (vLLM 0.33, models/lilicorr.py; arXiv 2608.20530).
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import LILICORR, DraftSpec, LatticeCorrelator
from dflash_trt.checkpoint.draft_tensors import CANDIDATE_FEATURES
from dflash_trt.engine.graph.layers import rms_norm
from dflash_trt.engine.graph.linear import linear
from dflash_trt.engine.graph.onnx_builder import COMPUTE, GraphBuilder
from dflash_trt.engine.signatures import CORRELATOR

ABSENT = -1e30  # bias of a candidate that is not there; minus infinity would make the softmax of none NaN
LAYER_NORM_EPS = 1e-5  # torch's default, which the published head has


def correlator_graph(draft: DraftCheckpoint) -> onnx.ModelProto:
    """candidate_embeds [B, K, k, H], candidate_log_probs [B, K, k], slot_hidden [B, K, H], anchor_hidden [B, H] and
    num_slots [1] -> candidate_scores [B, K, k, k]: of each candidate after each of the slot before.

    Features, softmax, norms and cosines are in FLOAT, the rest in the compute dtype. No candidate attends to those of
    slots from `num_slots` on, whose scores mean nothing.
    """
    spec, sizes = draft.spec, draft.spec.lilicorr
    assert sizes is not None
    K, k, C = spec.num_draft_tokens, sizes.top_k, sizes.hidden_size
    g = GraphBuilder(CORRELATOR, draft)
    states = _candidates(g, spec, sizes)
    with g.scope(f"{LILICORR}.bias"):
        bias = _attention_bias(g, spec, sizes)
    for layer in (f"{LILICORR}.layers.{i}" for i in range(sizes.num_layers)):
        normed = rms_norm(g, states, f"{layer}.attn_norm", spec.rms_norm_eps)
        states = g.op("Add", states, _attention(g, normed, f"{layer}.attn", bias, sizes, K * k))
        normed = rms_norm(g, states, f"{layer}.mlp_norm", spec.rms_norm_eps)
        states = g.op("Add", states, _mlp(g, normed, f"{layer}.mlp"))
    states = g.reshape(rms_norm(g, states, f"{LILICORR}.output_norm", spec.rms_norm_eps), [-1, K * k, C])
    anchor = linear(g, g.input("anchor_hidden"), f"{LILICORR}.context_proj")
    anchor = rms_norm(g, anchor, f"{LILICORR}.anchor_norm", spec.rms_norm_eps)  # [B, C]
    with g.scope(f"{LILICORR}.scores"):
        leaving, arriving = _vectors(g, states, anchor, spec, sizes)
        leaving = g.op("Mul", leaving, g.constant(float(sizes.logit_scale)))
        g.renamed_output(g.op("MatMul", leaving, g.op("Transpose", arriving, perm=[0, 1, 3, 2])), "candidate_scores")
    return g.model()


def _candidates(g: GraphBuilder, spec: DraftSpec, sizes: LatticeCorrelator) -> str:
    """States [B*K*k, C] that the correlator begins with."""
    K, k, H, C = spec.num_draft_tokens, sizes.top_k, spec.hidden_size, sizes.hidden_size
    embeds = g.reshape(g.input("candidate_embeds"), [-1, H])
    states = embeds if C == H else linear(g, embeds, f"{LILICORR}.token_proj")
    states = g.op("Add", states, _features(g, k, C))
    hidden = linear(g, g.reshape(g.input("slot_hidden"), [-1, H]), f"{LILICORR}.pass_hidden_proj")
    slots, ranks = (g.weight(f"{LILICORR}.{name}_embedding") for name in ("slot", "rank"))
    places = g.op("Add", g.reshape(slots, [K, 1, C]), g.reshape(ranks, [1, k, C]))
    states = g.op("Add", g.reshape(states, [-1, K, k, C]), g.reshape(hidden, [-1, K, 1, C]))
    return g.reshape(g.op("Add", states, places), [-1, C])


def _features(g: GraphBuilder, k: int, C: int) -> str:
    """feature_mlp of the layer-normed features [B*K*k, C] of candidates in falling order.

    Sums over five features are written out: a reduction and a GEMM with five columns cost four kernels more.
    """
    norm, mlp = f"{LILICORR}.feature_norm", f"{LILICORR}.feature_mlp"
    with g.scope(norm):
        log_probs = g.reshape(g.input("candidate_log_probs"), [-1, k, 1])
        best = g.op("Slice", log_probs, g.constant([0]), g.constant([1]), g.constant([1]))
        ranks = np.arange(k, dtype=np.float32)[:, None]
        features = [log_probs, g.op("Exp", log_probs), g.op("Sub", log_probs, best)]
        features += [g.constant(ranks / max(k - 1, 1)), g.constant((ranks == 0).astype(np.float32))]
        share = g.constant(1 / CANDIDATE_FEATURES)
        mean = g.op("Mul", _sum(g, features), share)
        features = [g.op("Sub", feature, mean) for feature in features]
        variance = g.op("Mul", _sum(g, [g.op("Mul", feature, feature) for feature in features]), share)
        deviation = g.op("Sqrt", g.op("Add", variance, g.constant(LAYER_NORM_EPS)))
        weights, biases = (
            [_row(g, g.weight(f"{norm}.{part}"), i) for i in range(CANDIDATE_FEATURES)] for part in ("weight", "bias")
        )
        features = [
            g.op("Add", g.op("Mul", g.op("Div", feature, deviation), weight), bias)
            for feature, weight, bias in zip(features, weights, biases, strict=True)
        ]
    with g.scope(mlp):
        columns = g.op("Transpose", g.weight(f"{mlp}.up_proj.weight"), perm=[1, 0])
        up = _sum(g, [g.op("Mul", feature, _row(g, columns, i)) for i, feature in enumerate(features)])
        up = g.op("Add", g.op("Cast", g.reshape(up, [-1, C]), to=COMPUTE), g.weight(f"{mlp}.up_proj.bias"))
        return linear(g, _silu(g, up), f"{mlp}.down_proj")


def _sum(g: GraphBuilder, terms: list[str]) -> str:
    total, *others = terms
    for term in others:
        total = g.op("Add", total, term)
    return total


def _row(g: GraphBuilder, weight: str, index: int) -> str:
    """A row of a weight, in FLOAT."""
    return g.op("Cast", g.op("Gather", weight, g.constant(index), axis=0), to=TensorProto.FLOAT)


def _mlp(g: GraphBuilder, x: str, name: str) -> str:
    """down(silu(up(x))) of rows."""
    with g.scope(name):
        return linear(g, _silu(g, linear(g, x, f"{name}.up_proj")), f"{name}.down_proj")


def _silu(g: GraphBuilder, x: str) -> str:
    return g.op("Mul", x, g.op("Sigmoid", x))


def _attention(g: GraphBuilder, x: str, name: str, bias: str, sizes: LatticeCorrelator, num_rows: int) -> str:
    """Attention of x [B*K*k, C] among the `num_rows` candidates of a block, as TensorRT's builder recognises it."""
    N, D = sizes.num_heads, sizes.hidden_size // sizes.num_heads
    with g.scope(name):
        qkv = g.op("Gemm", x, g.weight(f"{name}.in_proj_weight"), transB=1)
        qkv = g.op("Add", qkv, g.weight(f"{name}.in_proj_bias"))
        q, k, v = (g.reshape(part, [-1, num_rows, N, D]) for part in g.split(qkv, [sizes.hidden_size] * 3))
        q, v = (g.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, v))
        weights = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 2, 3, 1]))
        weights = g.op("Cast", weights, to=TensorProto.FLOAT)
        weights = g.op("Add", g.op("Mul", weights, g.constant(float(D**-0.5))), bias)
        weights = g.op("Cast", g.op("Softmax", weights, axis=-1), to=COMPUTE)
        mixed = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return linear(g, g.reshape(mixed, [-1, sizes.hidden_size]), f"{name}.out_proj")


def _attention_bias(g: GraphBuilder, spec: DraftSpec, sizes: LatticeCorrelator) -> str:
    """[heads, K*k, K*k] FLOAT: relative_slot_bias[slot(q) - slot(k) + S - 1], and same_slot_bias within a slot; ABSENT
    for the candidates k of slots that are not there.
    """
    K, k, N = spec.num_draft_tokens, sizes.top_k, sizes.num_heads
    slots = np.arange(K)
    distance = slots[:, None] - slots
    relative = g.op(
        "Gather", g.weight(f"{LILICORR}.relative_slot_bias"), g.constant(distance + spec.block_size - 1), axis=1
    )
    same = g.reshape(g.weight(f"{LILICORR}.same_slot_bias"), [N, 1, 1])
    own = g.op("Mul", same, g.op("Cast", g.constant((distance == 0).astype(np.float32)), to=COMPUTE))
    by_slot = g.reshape(g.op("Cast", g.op("Add", relative, own), to=TensorProto.FLOAT), [N, K, 1, K, 1])
    bias = g.reshape(g.op("Expand", by_slot, g.constant([N, K, k, K, k])), [N, K * k, K * k])
    is_there = g.op("Less", g.constant(slots.repeat(k).astype(np.int32)), g.input("num_slots"))
    return g.op("Where", is_there, bias, g.constant(ABSENT))


def _vectors(g: GraphBuilder, states: str, anchor: str, spec: DraftSpec, sizes: LatticeCorrelator) -> tuple[str, str]:
    """Unit vectors [B, K, k, factor_dim] FLOAT: outgoing ones of each slot's predecessors, and its own incoming ones.

    `states` [B, K*k, C] are the candidates', `anchor` [B, C] is that of the token that alone precedes the first slot.
    """
    K, k, C, F = spec.num_draft_tokens, sizes.top_k, sizes.hidden_size, sizes.factor_dim
    start = g.reshape(anchor, [-1, 1, C])
    starts = g.op("Expand", start, g.constant([1, K * k, 1]))
    joined = g.op("Concat", states, starts, g.op("Mul", states, start), axis=-1)
    z = _silu(g, linear(g, g.reshape(joined, [-1, 3 * C]), f"{LILICORR}.factor_input_proj"))
    vectors = linear(g, z, f"{LILICORR}.out_head", f"{LILICORR}.in_head")
    vectors = _unit(g, g.reshape(vectors, [-1, K, k, 2, F]), sizes.vector_eps)
    leaving, arriving = (g.op("Gather", vectors, g.constant(side), axis=3) for side in (0, 1))
    first = _unit(g, linear(g, anchor, f"{LILICORR}.anchor_out_head"), sizes.vector_eps)
    first = g.op("Expand", g.reshape(first, [-1, 1, 1, F]), g.constant([1, 1, k, 1]))
    if K == 1:
        return first, arriving
    before = g.op("Slice", leaving, g.constant([0]), g.constant([K - 1]), g.constant([1]))
    return g.op("Concat", first, before, axis=1), arriving


def _unit(g: GraphBuilder, x: str, eps: float) -> str:
    """x over its norm along the last axis, or over `eps` where that is larger, in FLOAT."""
    x = g.op("Cast", x, to=TensorProto.FLOAT)
    norm = g.op("ReduceL2", x, g.constant([-1]), keepdims=1)
    return g.op("Div", x, g.op("Max", norm, g.constant(float(eps))))
