# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a draft's tensors, from its facts."""

from __future__ import annotations

from dflash_trt.checkpoint.draft_spec import (
    CONFIDENCE,
    CONVOLVED,
    D2T,
    EMBEDDING,
    HEAD,
    LILICORR,
    MARKOV,
    MASK_EMBEDDING,
    SELECTOR,
    PartialDraftSpec,
)

CANDIDATE_FEATURES = 5
"""log p, p, log p below the best, rank from 0 to 1, and whether it is the best, of each candidate of LiLiCorr."""
Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def tensor_shapes(spec: PartialDraftSpec) -> Shapes:
    """Every unquantised tensor: 11 L + 3 of them, with attention_bias 15 L + 3, more by feature."""
    H, V = spec.hidden_size, spec.vocab_size or 0
    taps = range(len(spec.target_layer_ids) if spec.tap_norms else 0)
    shapes: Shapes = {f"aux_hidden_norms.{tap}.weight": (spec.tap_hidden_size or H,) for tap in taps}
    shapes["fc.weight"] = (H, spec.target_hidden_size)
    if spec.has_bias("fc"):
        shapes["fc.bias"] = (H,)
    shapes |= {"hidden_norm.weight": (H,), "norm.weight": (H,)}
    if spec.own_embedding:
        shapes[EMBEDDING] = (V, H)
    if spec.mask_embedding:
        shapes[MASK_EMBEDDING] = (H,)
    if spec.draft_vocab_size is not None:
        shapes[f"{HEAD}.weight"] = (spec.draft_vocab_size, H)
    if spec.has_d2t:
        shapes[D2T] = (spec.draft_vocab_size or 0,)
    for layer in range(spec.num_layers):
        shapes |= _layer_shapes(spec, layer)
    return shapes | added_shapes(spec)


def linear_shapes(spec: PartialDraftSpec) -> Shapes:
    """Rows and columns of the linear layers that recipes may name, by module."""
    shapes = tensor_shapes(spec)
    return {module: shapes[f"{module}.weight"] for module in spec.linear_modules()}


def _layer_shapes(spec: PartialDraftSpec, layer: int) -> Shapes:
    H, F, D, N = spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.num_attention_heads
    q, kv = N * D, spec.num_key_value_heads * D
    attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
    projections: Shapes = {
        f"{attention}.q_proj": (q, H),
        f"{attention}.k_proj": (kv, H),
        f"{attention}.v_proj": (kv, H),
        f"{attention}.o_proj": (H, q),
    }
    if spec.attention_gate is not None:
        projections[f"{attention}.g_proj"] = (N if spec.attention_gate == "per_head" else q, H)
    projections |= {f"{mlp}.gate_proj": (F, H), f"{mlp}.up_proj": (F, H), f"{mlp}.down_proj": (H, F)}
    biased = [name for name in projections if spec.has_bias(name.rpartition(".")[2])]
    shapes = {f"{name}.weight": shape for name, shape in projections.items()}
    shapes |= {f"{name}.bias": projections[name][:1] for name in biased}
    shapes |= {f"{attention}.q_norm.weight": (D,), f"{attention}.k_norm.weight": (D,)}
    if not isinstance(spec.layers, int) and spec.layers[layer].sinks:
        shapes[f"{attention}.sinks"] = (N,)
    norms = (f"layers.{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
    return shapes | dict.fromkeys(norms, (H,))


def added_shapes(spec: PartialDraftSpec) -> Shapes:
    """The tensors that DFlash2, DSpark and LiLiCorr add to DFlash, which no recipe quantises."""
    return dflash2_shapes(spec) | dspark_shapes(spec) | lilicorr_shapes(spec)


def dflash2_shapes(spec: PartialDraftSpec) -> Shapes:
    """The tensors of convolutions and selector."""
    H, shapes = spec.hidden_size, Shapes()
    if (conv := spec.block_conv) is not None:
        names = [f"layers.{layer}.{name}" for layer in range(spec.num_layers) for name in CONVOLVED.values()]
        rows = 2 * conv.kernel_size * (H // conv.group_size)
        shapes |= {f"{name}.base_kernel": (2, conv.kernel_size, H) for name in names}
        shapes |= {f"{name}.kernel_projection.weight": (rows, H) for name in names}
    if (selector := spec.candidate_selector) is not None:
        codebooks = (f"{SELECTOR}.{name}_codebook" for name in ("predecessor", "successor"))
        shapes |= dict.fromkeys(codebooks, (spec.vocab_size or 0, selector.rank))
        shapes[f"{SELECTOR}.hidden_projection.weight"] = (selector.rank, H)
    return shapes


def dspark_shapes(spec: PartialDraftSpec) -> Shapes:
    """The tensors of Markov and confidence head."""
    if (head := spec.markov_head) is None:
        return {}
    V, r, width = spec.vocab_size or 0, head.rank, spec.hidden_size + head.rank
    shapes: Shapes = {f"{MARKOV}.markov_w1.weight": (V, r), f"{MARKOV}.markov_w2.weight": (head.num_rows or V, r)}
    if head.is_gated:
        shapes |= {f"{MARKOV}.gate_proj.weight": (r, width), f"{MARKOV}.gate_proj.bias": (r,)}
    if head.confidence:
        shapes |= {f"{CONFIDENCE}.proj.weight": (1, width), f"{CONFIDENCE}.proj.bias": (1,)}
    return shapes


def lilicorr_shapes(spec: PartialDraftSpec) -> Shapes:
    """The tensors of LiLiCorr's correlator (vLLM 0.33, models/lilicorr.py)."""
    if (sizes := spec.lilicorr) is None:
        return {}
    H, C, F, S, V = spec.hidden_size, sizes.hidden_size, sizes.mlp_hidden_size, spec.block_size, sizes.factor_dim
    linears: Shapes = dict.fromkeys(("token_proj", "pass_hidden_proj", "context_proj"), (C, H))
    if C == H:
        del linears["token_proj"]  # the identity
    linears |= {"feature_mlp.up_proj": (C, CANDIDATE_FEATURES), "feature_mlp.down_proj": (C, C)}
    linears |= {"factor_input_proj": (C, 3 * C), "out_head": (V, C), "in_head": (V, C), "anchor_out_head": (V, C)}
    shapes: Shapes = {
        "feature_norm.weight": (CANDIDATE_FEATURES,), "feature_norm.bias": (CANDIDATE_FEATURES,),
        "slot_embedding": (1, 1, spec.num_draft_tokens, 1, C), "rank_embedding": (1, 1, 1, sizes.top_k, C),
        "relative_slot_bias": (sizes.num_heads, 2 * S - 1), "same_slot_bias": (sizes.num_heads,),
        "output_norm.weight": (C,), "anchor_norm.weight": (C,),
    }  # fmt: skip
    for layer in (f"layers.{i}" for i in range(sizes.num_layers)):
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * C, C), f"{layer}.attn.in_proj_bias": (3 * C,)}
        shapes |= {f"{layer}.attn_norm.weight": (C,), f"{layer}.mlp_norm.weight": (C,)}
        linears |= {f"{layer}.attn.out_proj": (C, C), f"{layer}.mlp.up_proj": (F, C), f"{layer}.mlp.down_proj": (C, F)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    return {f"{LILICORR}.{name}": shape for name, shape in shapes.items()}
