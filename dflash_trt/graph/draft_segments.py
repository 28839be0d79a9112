# SPDX-License-Identifier: Apache-2.0
"""draft.onnx of a rank that has some of the heads and MLP channels, cut where the ranks add up what they have.

The all-reduces between the segments are whose process it is: a collective inside a plan (TensorRT's DistCollective,
since 10.16) is NCCL's, where TensorRT-LLM has faster ones for blocks of a few rows.
"""

from __future__ import annotations

import onnx

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.engine.graphs import num_segments, segment_name, stream_names
from dflash_trt.graph.draft_graph import CONTEXT_INPUTS, attention
from dflash_trt.graph.layers import rms_norm, rotary_rows, swiglu, times
from dflash_trt.graph.onnx_builder import GraphBuilder


def draft_segments(shard: DraftCheckpoint) -> dict[str, onnx.ModelProto]:
    """The segments of `shard` (builder/shards.py), by name, as `graph_signatures` has them."""
    return {segment_name(i): _segment(shard, i) for i in range(num_segments(len(shard.spec.layers)))}


def _segment(shard: DraftCheckpoint, i: int) -> onnx.ModelProto:
    """Adds what the ranks added up to the residual stream, then computes this rank's part of a sublayer."""
    spec = shard.spec
    shape = [-1, spec.block_size, spec.hidden_size]
    g = GraphBuilder(segment_name(i), shard, is_shard=True)
    layer, is_mlp = divmod(i, 2)
    if i == 0:
        hidden = times(g, g.reshape(g.input("noise_embeds"), [-1, spec.hidden_size]), spec.input_embedding_scale)
        rope = g.op("Concat", *rotary_rows(g, g.input("positions"), spec), axis=-1)
        g.output(rope, "rope")
    else:
        hidden = g.op("Add", *(g.reshape(g.input(name), [-1, spec.hidden_size]) for name in stream_names(i)))
        rope = "rope"
    if layer == len(spec.layers):
        g.output(g.reshape(rms_norm(g, hidden, "norm", spec.rms_norm_eps), shape), "hidden")
        return g.model()
    name = f"layers.{layer}"
    if is_mlp:
        h = rms_norm(g, hidden, f"{name}.post_attention_layernorm", spec.rms_norm_eps)
        h = swiglu(g, h, f"{name}.mlp", spec.intermediate_size)
    else:
        if i:
            g.input(rope)
        h = rms_norm(g, hidden, f"{name}.input_layernorm", spec.rms_norm_eps)
        h = attention(g, h, rope, [g.input(value) for value in CONTEXT_INPUTS], shard, layer)
    for value, output in zip((hidden, h), stream_names(i + 1), strict=True):
        g.output(g.reshape(value, shape), output)
    return g.model()
