# SPDX-License-Identifier: Apache-2.0
"""What DFlashKVInjectionAttention means, in standard ops, for ONNX Runtime on a GPU, and to test against.

On a CPU the node is an operator of its own, `cpp/onnxruntime/attention_op.cpp`.
"""

from __future__ import annotations

import onnx

from dflash_trt.graph.draft_graph import ATTENTION
from dflash_trt.graph.onnx_builder import OPSET, PLUGIN_DOMAIN

WITH_SINKS = f"{ATTENTION}WithSinks"
NUM_INPUTS = 8
"""Of the function without sinks; its caches and pages take the place of the node's pointers, layout and page table."""

# The node written in ONNX's own text syntax. Every line is one operation; shapes stand behind it.
# C is the longest context of the batch: cache rows beyond it are never touched.
# A context may lie in M pages, each [L, C_max, G, D]: then slot_ids are [B, M], the pages of each block's context.
ATTENTION_BODY = """
<opset_import: ["" : %(opset)d], domain: "%(domain)s">
%(name)s <layer, num_heads, num_kv_heads, head_dim, rms_norm_eps, softmax_scale, sliding_window, causal,
          k_scale, v_scale, fp8_cache, plugin_namespace, plugin_version>
    (qkv, q_norm, k_norm, rope, k_cache, v_cache, slot_ids, context_lengths%(sinks)s) => (mixed)
{
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    last = Constant <value_ints: ints = [-1]> ()
    axis_1 = Constant <value_ints: ints = [1]> ()
    axis_2 = Constant <value_ints: ints = [2]> ()
    D = Constant <value_int: int = @head_dim> ()
    N = Constant <value_int: int = @num_heads> ()
    G = Constant <value_int: int = @num_kv_heads> ()
    layer_index = Constant <value_int: int = @layer> ()
    eps = Constant <value_float: float = @rms_norm_eps> ()
    window_attribute = Constant <value_int: int = @sliding_window> ()
    causal_attribute = Constant <value_int: int = @causal> ()

    qkv_shape = Shape (qkv)
    B = Gather <axis: int = 0> (qkv_shape, zero)
    S = Gather <axis: int = 0> (qkv_shape, one)
    B_1 = Unsqueeze (B, zero)
    S_1 = Unsqueeze (S, zero)
    D_1 = Unsqueeze (D, zero)
    N_1 = Unsqueeze (N, zero)
    G_1 = Unsqueeze (G, zero)
    ND_1 = Mul (N_1, D_1)
    GD_1 = Mul (G_1, D_1)
    widths = Concat <axis: int = 0> (ND_1, GD_1, GD_1)
    q, k, v = Split <axis: int = -1> (qkv, widths)

    two_1 = Constant <value_ints: ints = [2]> ()
    half_1 = Div (D_1, two_1)
    halves = Concat <axis: int = 0> (half_1, half_1)
    cos_3, sin_3 = Split <axis: int = -1> (rope, halves)
    cos = Unsqueeze (cos_3, axis_2)
    sin = Unsqueeze (sin_3, axis_2)

%(norm_and_rotate_q)s
    q_rows_shape = Concat <axis: int = 0> (B_1, S_1, ND_1)
    q_rows = Reshape (q_rotated, q_rows_shape)
%(norm_and_rotate_k)s
    block_rows_shape = Concat <axis: int = 0> (B_1, S_1, GD_1)
    block_k = Reshape (k_rotated, block_rows_shape)

    lengths = Cast <to: int = 7> (context_lengths)
    C = ReduceMax <keepdims: int = 0> (lengths)
    context_rows = Range (zero, C, one)
    cache_shape = Shape (k_cache)
    L = Gather <axis: int = 0> (cache_shape, one)
    two = Constant <value_int: int = 2> ()
    C_max = Gather <axis: int = 0> (cache_shape, two)
    slots = Cast <to: int = 7> (slot_ids)
    table_shape = Concat <axis: int = 0> (B_1, last)
    page_table = Reshape (slots, table_shape)
    page_layers = Mul (page_table, L)
    planes = Add (page_layers, layer_index)
    plane_rows = Mul (planes, C_max)
    page_of_row = Div (context_rows, C_max)
    row_of_page = Mod (context_rows, C_max)
    rows_of_planes = Gather <axis: int = 1> (plane_rows, page_of_row)
    row_ids = Add (rows_of_planes, row_of_page)
    flat_shape = Concat <axis: int = 0> (last, GD_1)
    k_flat = Reshape (k_cache, flat_shape)
    v_flat = Reshape (v_cache, flat_shape)
    context_k = Gather <axis: int = 0> (k_flat, row_ids)
    context_v = Gather <axis: int = 0> (v_flat, row_ids)
    all_k = Concat <axis: int = 1> (context_k, block_k)
    all_v = Concat <axis: int = 1> (context_v, v)

    length_column = Unsqueeze (lengths, axis_1)
    slots_of_block = Range (zero, S, one)
    q_positions = Add (length_column, slots_of_block)
    no_column = Sub (length_column, length_column)
    context_positions = Add (no_column, context_rows)
    k_positions = Concat <axis: int = 1> (context_positions, q_positions)
    context_exists = Less (context_positions, length_column)
    block_exists = GreaterOrEqual (q_positions, length_column)
    exists_2 = Concat <axis: int = 1> (context_exists, block_exists)
    exists = Unsqueeze (exists_2, axis_1)
    q_positions_3 = Unsqueeze (q_positions, axis_2)
    k_positions_3 = Unsqueeze (k_positions, axis_1)
    distance = Sub (q_positions_3, k_positions_3)
    distance_size = Abs (distance)
    unlimited = Equal (window_attribute, zero)
    far = Constant <value_int: int = 1073741824> ()
    window = Where (unlimited, far, window_attribute)
    in_window = Less (distance_size, window)
    bidirectional = Equal (causal_attribute, zero)
    not_after = GreaterOrEqual (distance, zero)
    in_order = Or (bidirectional, not_after)
    in_sight = And (in_window, in_order)
    visible_3 = And (in_sight, exists)
    visible = Unsqueeze (visible_3, axis_1)
%(softmax)s
}
"""

SOFTMAX = """
    mixed = Attention <q_num_heads: int = @num_heads, kv_num_heads: int = @num_kv_heads,
                       scale: float = @softmax_scale> (q_rows, all_k, all_v, visible)
"""
# A sink is one more key, of zeros, whose logit comes with the mask, and whose value is nothing.
SOFTMAX_WITH_SINKS = """
    one_1 = Constant <value_ints: ints = [1]> ()
    zero_float = Constant <value_float: float = 0.0> ()
    hidden = Constant <value_float: float = -3.0e38> ()
    no_key_shape = Concat <axis: int = 0> (B_1, one_1, GD_1)
    no_key = ConstantOfShape (no_key_shape)
    keys = Concat <axis: int = 1> (all_k, no_key)
    values = Concat <axis: int = 1> (all_v, no_key)
    mask = Where (visible, zero_float, hidden)
    heads_shape = Concat <axis: int = 0> (one_1, N_1, one_1, one_1)
    mask_of_heads = Expand (mask, heads_shape)
    sinks_4 = Reshape (sinks, heads_shape)
    sinks_shape = Concat <axis: int = 0> (B_1, N_1, S_1, one_1)
    sinks_of_rows = Expand (sinks_4, sinks_shape)
    logits = Concat <axis: int = -1> (mask_of_heads, sinks_of_rows)
    mixed = Attention <q_num_heads: int = @num_heads, kv_num_heads: int = @num_kv_heads,
                       scale: float = @softmax_scale> (q_rows, keys, values, logits)
"""

NORM_AND_ROTATE = """
    {x}_heads_shape = Concat <axis: int = 0> (B_1, S_1, {heads}, D_1)
    {x}_heads = Reshape ({x}, {x}_heads_shape)
    {x}_square = Mul ({x}_heads, {x}_heads)
    {x}_mean = ReduceMean <keepdims: int = 1> ({x}_square, last)
    {x}_mean_eps = Add ({x}_mean, eps)
    {x}_rms = Sqrt ({x}_mean_eps)
    {x}_unit = Div ({x}_heads, {x}_rms)
    {x}_normed = Mul ({x}_unit, {x}_norm)
    {x}_first, {x}_second = Split <axis: int = -1> ({x}_normed, halves)
    {x}_first_cos = Mul ({x}_first, cos)
    {x}_first_sin = Mul ({x}_first, sin)
    {x}_second_cos = Mul ({x}_second, cos)
    {x}_second_sin = Mul ({x}_second, sin)
    {x}_low = Sub ({x}_first_cos, {x}_second_sin)
    {x}_high = Add ({x}_second_cos, {x}_first_sin)
    {x}_rotated = Concat <axis: int = -1> ({x}_low, {x}_high)
"""


def attention_function(*, with_sinks: bool) -> onnx.FunctionProto:
    """DFlashKVInjectionAttention in standard ops: FLOAT qkv and caches; with the ninth input it has another name."""
    body = ATTENTION_BODY % {
        "opset": OPSET,
        "domain": PLUGIN_DOMAIN,
        "name": WITH_SINKS if with_sinks else ATTENTION,
        "sinks": ", sinks" if with_sinks else "",
        "softmax": SOFTMAX_WITH_SINKS if with_sinks else SOFTMAX,
        "norm_and_rotate_q": NORM_AND_ROTATE.format(x="q", heads="N_1"),
        "norm_and_rotate_k": NORM_AND_ROTATE.format(x="k", heads="G_1"),
    }
    return onnx.parser.parse_function(body)
