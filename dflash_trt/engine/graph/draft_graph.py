# SPDX-License-Identifier: Apache-2.0
"""draft.onnx: one forward pass over the block, reading the injected context."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import CONVOLVED, HEAD, DraftSpec
from dflash_trt.checkpoint.own_vocabulary import head_token_ids
from dflash_trt.engine.graph.layers import (
    convolved,
    gathered,
    pad_rows,
    rms_norm,
    rotary_order,
    rotary_rows,
    swiglu,
    times,
    unpad_rows,
)
from dflash_trt.engine.graph.linear import fp8_input_scale, linear, partial_linear, product, stacked_biases
from dflash_trt.engine.graph.onnx_builder import COMPUTE, PLUGIN_DOMAIN, GraphBuilder
from dflash_trt.engine.signatures import is_padded, num_segments, segment_name, stream_names

ATTENTION = "DFlashKVInjectionAttention"
PLUGIN_VERSION = "5"
CONTEXT_INPUTS = ("context_pointers", "context_layout", "page_table", "slot_ids", "context_lengths")


def draft_graph(draft: DraftCheckpoint) -> onnx.ModelProto:
    """noise_embeds [B, S, H], positions [B, S], context_pointers [L, 2], context_layout [6], page_table
    [slots, M], slot_ids [B] (rows of the page table), context_lengths [B] -> hidden [B, S, H], and proposals if the
    draft has its own head (`graph_signatures`).

    The context is read only: the block's own K and V exist during this pass only and are never stored. Proposals are
    the rows of a block from `first_proposing_row` on.
    Between the attention nodes the residual stream has one row a token, [B*S, H], and rows of padding where layers take
    NVFP4 activations.
    """
    spec = draft.spec
    S, H = spec.block_size, spec.hidden_size
    g = GraphBuilder("draft", draft)
    hidden, positions = g.reshape(g.input("noise_embeds"), [-1, H]), g.input("positions")
    context = [g.input(name) for name in CONTEXT_INPUTS]

    hidden = times(g, hidden, spec.input_embedding_scale)
    rope = g.op("Concat", *rotary_rows(g, positions, spec), axis=-1)  # [B, S, D]: cos | sin
    padded = is_padded(spec, draft.quantization)
    if padded:
        hidden, rows = pad_rows(g, hidden)

    for i in range(len(spec.layers)):
        layer = f"layers.{i}"
        h = rms_norm(g, hidden, f"{layer}.input_layernorm", spec.rms_norm_eps)
        mixed = partial(attention, g, rope=rope, context=context, draft=draft, i=i)
        h = convolved(g, h, f"{layer}.{CONVOLVED['self_attn']}", spec, mixed)
        hidden = g.op("Add", hidden, h)
        h = rms_norm(g, hidden, f"{layer}.post_attention_layernorm", spec.rms_norm_eps)
        mlp = partial(swiglu, g, mlp=f"{layer}.mlp", width=spec.intermediate_size)
        h = convolved(g, h, f"{layer}.{CONVOLVED['mlp']}", spec, mlp)
        if padded and i == len(spec.layers) - 1:
            hidden, h = (unpad_rows(g, x, rows) for x in (hidden, h))
        hidden = g.named("Add", hidden, h, name=output_name(i))

    hidden = g.reshape(rms_norm(g, hidden, "norm", spec.rms_norm_eps), [-1, S, H])
    g.output(hidden, "hidden")
    if spec.has_own_head:
        _propose(g, hidden, draft)
    return g.model()


def _propose(g: GraphBuilder, hidden: str, draft: DraftCheckpoint) -> None:
    """Applies the head to the proposing rows of hidden [B, S, H]: the best token of each, or candidates."""
    spec = draft.spec
    K, H, V = spec.num_draft_tokens, spec.hidden_size, spec.draft_vocab_size
    assert V is not None
    with g.scope(HEAD):
        rows = hidden
        if skipped := spec.first_proposing_row:
            _, rows = g.split(g.reshape(hidden, [-1, spec.block_size * H]), [skipped * H, K * H])
        logits = g.reshape(linear(g, g.reshape(rows, [-1, H]), HEAD), [-1, K, V])
        logits = g.op("Cast", logits, to=TensorProto.FLOAT)  # a Reshape after the search would cost a kernel
        if (k := spec.num_candidates) is None:
            best = _target_ids(g, g.op("ArgMax", logits, axis=-1, keepdims=0), draft)
            g.renamed_output(g.op("Cast", best, to=TensorProto.INT32), "token_ids")
            return
        # Up to k = 20 on many blocks of the GPU: findings/tensorrt_rtx_splits_a_row_of_topk_up_to_20.sh
        top, best = g.ops("TopK", (logits, g.constant([k])), num_outputs=2, axis=-1)
        g.renamed_output(_target_ids(g, best, draft), "candidate_ids")
        values = _final_logits(g, top, spec) if spec.lilicorr is None else _log_probs(g, top, logits)
        g.renamed_output(values, "candidate_logits")


def _target_ids(g: GraphBuilder, rows: str, draft: DraftCheckpoint) -> str:
    """The target's token ids INT64 of rows of the head, INT64."""
    token_ids = head_token_ids(draft.spec, draft.weights)
    return rows if token_ids is None else g.op("Gather", g.constant(token_ids.astype(np.int64)), rows, axis=0)


def _final_logits(g: GraphBuilder, logits: str, spec: DraftSpec) -> str:
    """c tanh(m logits / c) FLOAT, with multiplier m and cap c."""
    if spec.output_multiplier != 1:
        logits = g.op("Mul", logits, g.constant(float(spec.output_multiplier)))
    if cap := spec.final_logit_softcapping:
        logits = g.op("Mul", g.op("Tanh", g.op("Div", logits, g.constant(float(cap)))), g.constant(float(cap)))
    return logits


def _log_probs(g: GraphBuilder, top: str, logits: str) -> str:
    """log softmax(logits) of `top` in FLOAT, without its cap."""
    # LogSoftmax would underflow: findings/tensorrt_rtx_log_softmax_is_the_log_of_a_softmax.sh
    return g.op("Sub", top, g.op("ReduceLogSumExp", logits, g.constant([-1]), keepdims=1))


def output_name(layer: int) -> str:
    """The value [B*S, H] that is the residual stream after a layer."""
    return f"layers.{layer}/output"


def attention(g: GraphBuilder, h: str, rope: str, context: list[str], draft: DraftCheckpoint, i: int) -> str:
    """Block attention of layer `i` over [context rows < context_length | block], h [B*S, H] -> [B*S, H].

    The node's inputs: qkv [B*S, (N + 2G)*D] as output by the GEMM, query heads, key heads, value heads (before norm and
    rotation), q_norm and k_norm [D], rope [B, S, D], CONTEXT_INPUTS, the bias of qkv if no GEMM adds it, and sinks [N]
    if the layer has them. Its output is [B*S, N*D], in FP8 if o_proj's input is. Rows of padding after those of the
    block are allowed in both. Context row j stands at position j, block slot s at position context_length + s.
    """
    spec = draft.spec
    N, G, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    module = f"layers.{i}.self_attn"
    with g.scope(module):
        qkv, biases = _qkv(g, h, module, spec)
        output_scale = None if spec.attention_gate else fp8_input_scale(g, f"{module}.o_proj")
        norms = [gathered(g, g.weight(f"{module}.{x}_norm.weight"), rotary_order(spec)) for x in "qk"]
        layer = spec.layers[i]
        sinks = [g.op("Cast", g.stored([f"{module}.sinks"]), to=TensorProto.FLOAT)] if layer.sinks else []
        mixed = g.op(
            ATTENTION,
            *(qkv, *norms, rope, *context, *biases, *sinks),
            domain=PLUGIN_DOMAIN,
            plugin_namespace=PLUGIN_DOMAIN,
            plugin_version=PLUGIN_VERSION,
            layer=i,
            num_heads=N,
            num_kv_heads=G,
            head_dim=D,
            rms_norm_eps=spec.rms_norm_eps,
            softmax_scale=D**-0.5,
            sliding_window=layer.sliding_window or 0,  # 0: unlimited
            causal=int(layer.causal),
            k_scale=draft.cache_scales("k")[i],  # scale of an FP8 cache, as in context.onnx; 1 otherwise
            v_scale=draft.cache_scales("v")[i],
            fp8_cache=int(draft.quantization.fp8_kv_cache),
            has_qkv_bias=len(biases),
            fp8_output=int(output_scale is not None),
            output_scale=1.0 if output_scale is None else output_scale,
        )
        if spec.attention_gate is not None:
            mixed = _gate(g, mixed, linear(g, h, f"{module}.g_proj"), spec)
        return partial_linear(g, mixed, f"{module}.o_proj", is_quantized=output_scale is not None)


def _qkv(g: GraphBuilder, h: str, module: str, spec: DraftSpec) -> tuple[str, list[str]]:
    """qkv [B*S, (N + 2G)*D] of h [B*S, H], and the bias that the attention node must add, if there is one.

    TensorRT's dense GEMMs add a bias themselves. After a quantised GEMM it would cost a kernel, unless the one that
    reorders or scales adds it.
    """
    modules = tuple(f"{module}.{x}_proj" for x in "qkv")
    is_dense = all(g.algorithm(name) is None for name in modules)
    is_changed = spec.value_scale != 1 or not np.array_equal(rotary_order(spec), np.arange(spec.head_dim))
    if is_dense or is_changed:
        return _scaled_values(g, _in_order(g, linear(g, h, *modules), spec), spec), []
    biases = stacked_biases(g, *modules)
    return product(g, h, *modules), [] if biases is None else [biases]


def _in_order(g: GraphBuilder, qkv: str, spec: DraftSpec) -> str:
    """qkv [B*S, (N + 2G)*D] with each head of q and k in `rotary_order`; v unchanged."""
    N, G, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    heads = np.arange((N + 2 * G) * D).reshape(-1, D)
    heads[: N + G] = heads[: N + G, rotary_order(spec)]
    return gathered(g, qkv, heads.reshape(-1))


def _scaled_values(g: GraphBuilder, qkv: str, spec: DraftSpec) -> str:
    """qkv [B*S, (N + 2G)*D] with v times `value_scale`, in one node that does not change q and k."""
    N, G, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    factors = np.array([1, spec.value_scale], dtype=np.float32)
    return times(g, qkv, np.repeat(factors, [(N + G) * D, G * D]))


def _gate(g: GraphBuilder, mixed: str, gate: str, spec: DraftSpec) -> str:
    """softplus(gate) times mixed [B*S, N*D], one factor per head or per element, in FLOAT (laguna.py of vLLM 0.32)."""
    N, D = spec.num_attention_heads, spec.head_dim
    factors = N if spec.attention_gate == "per_head" else N * D
    gate = g.op("Softplus", g.op("Cast", gate, to=TensorProto.FLOAT))
    parts = g.reshape(g.op("Cast", mixed, to=TensorProto.FLOAT), [-1, factors, N * D // factors])
    gated = g.op("Mul", parts, g.reshape(gate, [-1, factors, 1]))
    return g.reshape(g.op("Cast", gated, to=COMPUTE), [-1, N * D])


def draft_segments(shard: DraftCheckpoint) -> dict[str, onnx.ModelProto]:
    """The segments of `shard` (engine/engine_directory.py), by name, as `graph_signatures` has them.

    draft.onnx of a rank with a part of the heads and MLP channels, cut where the ranks sum their results. The caller
    runs the all-reduces between the segments: a collective inside a plan (TensorRT's DistCollective, since 10.16) uses
    NCCL, and TensorRT-LLM has faster ones for blocks of a few rows.
    """
    return {segment_name(i): _segment(shard, i) for i in range(num_segments(len(shard.spec.layers)))}


def _segment(shard: DraftCheckpoint, i: int) -> onnx.ModelProto:
    """Adds the sum over the ranks to the residual stream, then computes this rank's part of a sublayer."""
    spec = shard.spec
    g = GraphBuilder(segment_name(i), shard, is_shard=True)
    layer, is_mlp = divmod(i, 2)
    if i == 0:
        hidden = times(g, g.reshape(g.input("noise_embeds"), [-1, spec.hidden_size]), spec.input_embedding_scale)
        rope = g.op("Concat", *rotary_rows(g, g.input("positions"), spec), axis=-1)
        g.renamed_output(rope, "rope")
        if is_padded(spec, shard.quantization):
            hidden, _ = pad_rows(g, hidden)
    else:
        residual, total = (g.input(name) for name in stream_names(i))
        before = f"layers.{(i - 1) // 2}"
        summed = f"{before}.self_attn.o_proj" if is_mlp else f"{before}.mlp.down_proj"
        if (bias := stacked_biases(g, summed)) is not None:
            total = g.op("Add", total, bias)
        hidden = g.op("Add", residual, total)
    if layer == len(spec.layers):
        g.renamed_output(rms_norm(g, hidden, "norm", spec.rms_norm_eps), "hidden")
        return g.model()
    name = f"layers.{layer}"
    if is_mlp:
        h = rms_norm(g, hidden, f"{name}.post_attention_layernorm", spec.rms_norm_eps)
        h = swiglu(g, h, f"{name}.mlp", spec.intermediate_size)
    else:
        if i:
            g.input("rope")
        h = rms_norm(g, hidden, f"{name}.input_layernorm", spec.rms_norm_eps)
        h = attention(g, h, "rope", [g.input(value) for value in CONTEXT_INPUTS], shard, layer)
    for value, output in zip((hidden, h), stream_names(i + 1), strict=True):
        g.renamed_output(value, output)
    return g.model()
