# SPDX-License-Identifier: Apache-2.0
"""`DraftSpec`: the complete list of a draft model's facts, and values derived from them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dflash_trt.checkpoint.rope import Rope

Positive = Annotated[int, msgspec.Meta(ge=1)]
GateWidth = Literal["per_head", "per_element"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BIASED = ("fc", *ATTENTION, *MLP)
SELECTOR = "candidate_selector"
CONVOLVED = {"self_attn": "attention_conv", "mlp": "mlp_conv"}
"""The convolution around each sublayer of a DFlash2 draft."""
MARKOV, CONFIDENCE = "markov_head", "confidence_head"
LILICORR = "lilicorr"
MARKOV_CANDIDATES = 32
"""Candidates of each slot that a Markov head scores, the best by logits. Our choice: it affects drafts, never answers.

Scoring the whole vocabulary would cost a sequential GEMM for each slot (vLLM 0.33 prunes with dspark_draft_topk).
"""
EMBEDDING, MASK_EMBEDDING, HEAD, D2T = "embed_tokens.weight", "mask_embedding", "lm_head", "d2t"
"""Tensors (HEAD is a module) of drafts with an embedding or lm_head of their own."""


class DraftLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Window, causality and sinks of one layer's attention."""

    sliding_window: Positive | None
    """Visible distance in tokens: |q - k| < sliding_window; None sees everything."""
    causal: bool
    """Whether a row of the block does not attend to later rows."""
    sinks: bool = False
    """Whether each head has a learned sink logit, which takes part in the softmax and adds no value (gpt-oss, MiMo)."""


class BlockConv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DFlash2's grouped dynamic convolution over the rows of a block, before and after each sublayer."""

    kernel_size: Positive
    """Input rows of an output row: itself and the kernel_size - 1 before it in its block."""
    group_size: Positive
    """Channels that share the row-dependent part of their coefficients."""


class SelectorSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DFlash2's candidate selector: a bilinear score of neighbouring tokens, among the top_k of each slot."""

    rank: Positive
    top_k: Positive


class MarkovHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """DSpark's Markov head: adds markov_w2 @ markov_w1[previous token] to the logits."""

    rank: Positive
    is_gated: bool = False
    """Whether that row is multiplied by sigmoid(gate_proj([hidden; row])) first."""
    confidence: bool = False
    """Whether confidence_head.proj predicts from [hidden; row] how likely the slot's token is accepted."""
    num_rows: Positive | None = None
    """Rows of markov_w2: V' of a draft trained with a smaller vocabulary, None for the target's V.

    When `build` trims the head, markov_w2 stays whole.
    """


class LatticeCorrelator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LiLiCorr's transformer over all K * top_k candidates of a block, whose two vectors each score the edges."""

    hidden_size: Positive
    num_layers: Annotated[int, msgspec.Meta(ge=0)]
    num_heads: Positive
    mlp_ratio: Annotated[float, msgspec.Meta(gt=0)]
    """Channels of an MLP for each of hidden_size."""
    top_k: Positive
    factor_dim: Positive
    """Size of the two vectors of a candidate: the score of an edge is a scaled cosine."""
    vector_eps: Annotated[float, msgspec.Meta(gt=0)]
    """Smallest norm by which a vector is divided."""
    logit_scale: float

    @property
    def mlp_hidden_size(self) -> int:
        """Channels of a layer's MLP, rounded down as in vLLM 0.33."""
        return int(self.hidden_size * self.mlp_ratio)


class PartialDraftSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The known facts of a DFlash draft: all of them (`DraftSpec`), or the published ones; None is unknown."""

    model_type: str | None = None
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[DraftLayer, ...] | int
    """Each layer; for a published draft only their number."""
    attention_bias: bool
    """Whether q, k, v and o projections carry biases (the gpt-oss drafters)."""
    rms_norm_eps: float | None = None
    rope: Rope | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    """V, the target's vocabulary size."""
    block_size: int
    """S: rows of a block, the last verified token and S - 1 mask tokens."""
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...]
    """The taps: tap i is the target's residual stream after decoder layer i."""
    num_target_layers: int | None = None
    """Decoder layers of the target it was trained for, where the checkpoint says so."""
    input_embedding_scale: float | None = None
    """Multiplies the block's embeddings (Gemma: sqrt(hidden_size)), 1 where the checkpoint has none."""
    biases: tuple[str, ...] = ()
    """Projections of BIASED that carry biases, in addition to those of `attention_bias`."""
    value_scale: float = 1
    """Multiplies V of context and block (MiMo's attention_value_scale)."""
    tap_hidden_size: Positive | None = None
    """Width of one tap where the target's hidden_size differs from the draft's."""
    tap_norms: bool = False
    """Whether each tap passes an RMSNorm of its own before fc (Laguna's aux_hidden_norms)."""
    context_input_layernorm: bool = False
    """Whether context rows pass each layer's input_layernorm before K and V (Laguna)."""
    attention_gate: GateWidth | None = None
    """Width of the gate softplus(g_proj(h)) on the output of attention (Laguna); h is the input of q_proj."""
    own_embedding: bool = False
    """Whether the draft has an embed_tokens [V, H] of its own and does not borrow the target's."""
    mask_embedding: bool = False
    """Whether a vector `mask_embedding` [H] replaces row `mask_token_id` of the embedding (MiMo)."""
    draft_vocab_size: Positive | None = None
    """V', the rows of the draft's own lm_head; None where it borrows the target's.

    Where V' differs from V, row i proposes token i + d2t[i].
    """
    block_conv: BlockConv | None = None
    """None in drafts without convolutions."""
    candidate_selector: SelectorSizes | None = None
    """None in drafts other than DFlash2's."""
    markov_head: MarkovHead | None = None
    """None in drafts other than DSpark's."""
    lilicorr: LatticeCorrelator | None = None
    """None in drafts other than LiLiCorr's."""
    sample_from_anchor: bool = False
    """Whether row j of a block predicts the token after its own position, row 0 too (DSpark), so that K = S."""
    output_multiplier: float = 1
    """Multiplies logits. Like the cap it preserves their order, so it matters to a selector alone."""
    final_logit_softcapping: float | None = None
    """c of c tanh(logits / c)."""

    @property
    def num_layers(self) -> int:
        """L."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    @property
    def num_draft_tokens(self) -> int:
        """K: proposals per block."""
        return self.block_size - self.first_proposing_row

    @property
    def first_proposing_row(self) -> int:
        """First row of a block that proposes: 1, or 0 where the draft samples from the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def is_dspark(self) -> bool:
        """Whether other runtimes call it DSpark and do not run it as DFlash."""
        return self.sample_from_anchor or self.markov_head is not None

    @property
    def kind(self) -> str:
        """Name of its kind, for errors of code that does not support every kind."""
        if self.markov_head is not None:
            return "DSpark"
        if self.sample_from_anchor:
            return "anchor-first DFlash"
        if self.lilicorr is not None:
            return "LiLiCorr"
        return "DFlash" if self.block_conv is None and self.candidate_selector is None else "DFlash2"

    @property
    def num_candidates(self) -> int | None:
        """k, candidates of each slot; None where nothing scores them after the candidates of the slot before."""
        if self.markov_head is not None:
            return min(MARKOV_CANDIDATES, self.draft_vocab_size or self.vocab_size or MARKOV_CANDIDATES)
        scorer = self.lilicorr or self.candidate_selector
        return None if scorer is None else scorer.top_k

    @property
    def target_hidden_size(self) -> int:
        """Width of one row of taps, A * H."""
        return len(self.target_layer_ids) * (self.tap_hidden_size or self.hidden_size)

    def has_bias(self, projection: str) -> bool:
        """Whether a projection of BIASED carries a bias."""
        return projection in self.biases or (self.attention_bias and projection in ATTENTION)

    def context_bytes_per_token(self, *, fp8: bool, num_ranks: int = 1) -> int:
        """Bytes of injected K and V per context token over all layers, in an FP8 or BF16 cache, on one of `num_ranks`
        ranks.
        """
        heads = -(-self.num_key_value_heads // num_ranks)  # a head is never split
        return self.num_layers * 2 * heads * self.head_dim * (1 if fp8 else 2)

    def attention_modules(self) -> list[str]:
        """The self_attn modules, layer by layer."""
        return [f"layers.{layer}.self_attn" for layer in range(self.num_layers)]

    def context_modules(self) -> list[str]:
        """The projections that make context rows: every layer's K, then every layer's V."""
        return [f"{layer}.{kv}_proj" for kv in "kv" for layer in self.attention_modules()]

    def stacks(self) -> list[list[str]]:
        """Modules that draft.onnx fuses into one GEMM: q, k, v and gate, up of each layer."""
        qkv = [[f"{layer}.{x}_proj" for x in "qkv"] for layer in self.attention_modules()]
        gate_up = [[f"layers.{i}.mlp.{x}_proj" for x in ("gate", "up")] for i in range(self.num_layers)]
        return [stack for pair in zip(qkv, gate_up, strict=True) for stack in pair]

    def linear_modules(self) -> list[str]:
        """The linear layers that recipes may name: DFlash's own, without embedding and lm_head."""
        attention = ATTENTION if self.attention_gate is None else (*ATTENTION, "g_proj")
        modules = [*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in MLP)]
        return ["fc", *(f"layers.{layer}.{module}" for layer in range(self.num_layers) for module in modules)]

    @property
    def has_own_head(self) -> bool:
        """Whether proposals come from an lm_head of the draft's own."""
        return self.draft_vocab_size is not None

    @property
    def own_vocabulary(self) -> list[str]:
        """Names of its own embedding, mask embedding and head, as far as it does not borrow the target's."""
        has_it = (self.own_embedding, self.mask_embedding, self.has_own_head)
        return [name for name, is_own in zip(("embed_tokens", MASK_EMBEDDING, HEAD), has_it, strict=True) if is_own]

    @property
    def has_d2t(self) -> bool:
        """Whether the rows of its own head are not the whole vocabulary, so that `d2t` maps them to tokens."""
        return self.draft_vocab_size not in (None, self.vocab_size)


class DraftSpec(PartialDraftSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All facts of a DFlash draft, read from its config.json: the same fields, fewer of them optional."""

    model_type: str
    layers: tuple[DraftLayer, ...]
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    vocab_size: int | None
    """None where the checkpoint does not say it, so that it is the target's."""
    mask_token_id: int
    num_target_layers: int | None
    """None where the checkpoint does not say it."""
    input_embedding_scale: float
