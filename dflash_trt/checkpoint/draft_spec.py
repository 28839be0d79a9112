# SPDX-License-Identifier: Apache-2.0
"""`DraftSpec`: the facts of a draft model, the only list of them, and what follows from them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dflash_trt.checkpoint.rope import Rope

Positive = Annotated[int, msgspec.Meta(ge=1)]
Shape = tuple[int, ...]
GateWidth = Literal["per_head", "per_element"]
BIASED = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SELECTOR = "candidate_selector"
CONVOLVED = {"self_attn": "attention_conv", "mlp": "mlp_conv"}
"""The convolution around each sublayer of a DFlash2 draft."""
MARKOV, CONFIDENCE = "markov_head", "confidence_head"
MARKOV_CANDIDATES = 32
"""Tokens of each slot that a Markov head chooses among, the best by logits alone: ours, and it changes no answer.

Over the whole vocabulary it is a GEMM for each slot, one after the other (vLLM 0.33 prunes with dspark_draft_topk).
"""
EMBEDDING, MASK_EMBEDDING, HEAD, D2T = "embed_tokens.weight", "mask_embedding", "lm_head", "d2t"
"""Tensors, and one module, that only drafts with an embedding or a head of their own have."""


class DraftLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one layer's attention may see besides the context."""

    sliding_window: Positive | None
    """Visible distance in tokens: |q - k| < sliding_window; None sees everything."""
    causal: bool
    """Whether a block slot is blind to the slots after it."""
    sinks: bool = False
    """Whether each head has a learned logit that takes its part of the softmax and brings no value (gpt-oss, MiMo)."""


class BlockConv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DFlash2's grouped dynamic convolution over the rows of a block, before and after each sublayer."""

    kernel_size: Positive
    """Taps: a row and the kernel_size - 1 before it in its block."""
    group_size: Positive
    """Channels that share the part of their coefficients which depends on the row."""


class SelectorSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DFlash2's choice among the top_k tokens of each slot, by a bilinear score of neighbours."""

    rank: Positive
    top_k: Positive


class MarkovHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """DSpark's scores of neighbours: logits gain markov_w2 times the row of markov_w1 of the token before."""

    rank: Positive
    is_gated: bool = False
    """Whether that row is multiplied by sigmoid(gate_proj([hidden; row])) first."""
    confidence: bool = False
    """Whether confidence_head.proj of [hidden; row] says how likely the slot's token is accepted."""
    num_rows: Positive | None = None
    """V' of a draft trained with a smaller vocabulary, whose rows those of markov_w2 are; None for all of the target's.

    A head that `build` trims leaves markov_w2 whole.
    """


class PartialDraftSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of a DFlash draft model: all of it (`DraftSpec`), or what was published; None is not known."""

    model_type: str | None = None
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[DraftLayer, ...] | int
    """Layer by layer; of a published draft only their number."""
    attention_bias: bool
    """Whether q, k, v and o projections carry biases (the gpt-oss drafters)."""
    rms_norm_eps: float | None = None
    rope: Rope | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    """V, the target's: what the draft borrows of embedding and lm_head, and what `token_ids` are of."""
    block_size: int
    """S: the last verified token and S - 1 mask tokens."""
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...]
    """The taps: tap i is the target's residual stream after decoder layer i."""
    num_target_layers: int | None = None
    """Decoder layers of the target it was trained for, where the checkpoint says so."""
    input_embedding_scale: float | None = None
    """Multiplies the block's embeddings (Gemma: sqrt(hidden_size)), 1 where the checkpoint has none."""
    biases: tuple[str, ...] = ()
    """Which projections of BIASED carry biases besides those of `attention_bias`."""
    value_scale: float = 1
    """Multiplies V of context and block (MiMo's attention_value_scale)."""
    tap_hidden_size: Positive | None = None
    """Width of one tap, where the target's hidden_size is not the draft's."""
    tap_norms: bool = False
    """Whether each tap passes an RMSNorm of its own before fc (Laguna's aux_hidden_norms)."""
    context_input_layernorm: bool = False
    """Whether context rows pass each layer's input_layernorm before K and V, as Laguna's do and others' do not."""
    attention_gate: GateWidth | None = None
    """softplus(g_proj(h)) on what attention returns (Laguna), h as q_proj reads it."""
    own_embedding: bool = False
    """Whether the draft has an embed_tokens [V, H]; else it borrows the target's."""
    mask_embedding: bool = False
    """Whether a vector `mask_embedding` [H] stands for the embedding's row `mask_token_id` (MiMo)."""
    draft_vocab_size: Positive | None = None
    """V', the rows of the draft's own lm_head; None where it borrows the target's.

    Where V' is not V, `d2t` [V'] says which tokens they are: row i proposes token i + d2t[i].
    """
    block_conv: BlockConv | None = None
    """None in drafts without convolutions."""
    candidate_selector: SelectorSizes | None = None
    """None where nothing but logits scores candidates, or a Markov head does."""
    markov_head: MarkovHead | None = None
    """None in drafts other than DSpark's."""
    sample_from_anchor: bool = False
    """Whether row j of a block predicts the token behind its own position, row 0 too (DSpark), so that K = S."""
    output_multiplier: float = 1
    """Multiplies logits. Like the cap it keeps their order, which is all that counts without a selector."""
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
        """Whether other runtimes know it as DSpark, which they do not run as DFlash."""
        return self.sample_from_anchor or self.markov_head is not None

    @property
    def kind(self) -> str:
        """Name of what it is, for what does not take every kind."""
        if self.markov_head is not None:
            return "DSpark"
        if self.sample_from_anchor:
            return "anchor-first DFlash"
        return "DFlash" if self.block_conv is None and self.candidate_selector is None else "DFlash2"

    @property
    def num_candidates(self) -> int | None:
        """k, tokens of each slot that are scored behind those of the slot before; None without such scores."""
        if self.markov_head is not None:
            return min(MARKOV_CANDIDATES, self.draft_vocab_size or self.vocab_size or MARKOV_CANDIDATES)
        return None if self.candidate_selector is None else self.candidate_selector.top_k

    @property
    def target_hidden_size(self) -> int:
        """Width of one row of taps, A * H."""
        return len(self.target_layer_ids) * (self.tap_hidden_size or self.hidden_size)

    def has_bias(self, projection: str) -> bool:
        """Whether a projection of BIASED carries a bias."""
        return projection in self.biases or (self.attention_bias and projection in ATTENTION)

    def context_bytes_per_token(self, *, fp8: bool, num_ranks: int = 1) -> int:
        """Bytes of injected K and V per context token, all layers, in an FP8 or a BF16 cache, on one of `num_ranks`."""
        heads = -(-self.num_key_value_heads // num_ranks)  # a head is never split
        return self.num_layers * 2 * heads * self.head_dim * (1 if fp8 else 2)

    def attention_modules(self) -> list[str]:
        """The self_attn modules, layer by layer."""
        return [f"layers.{layer}.self_attn" for layer in range(self.num_layers)]

    def context_modules(self) -> list[str]:
        """The projections that make context rows: every layer's K, then every layer's V."""
        return [f"{layer}.{kv}_proj" for kv in "kv" for layer in self.attention_modules()]

    def stacks(self) -> list[list[str]]:
        """Modules that draft.onnx multiplies in one GEMM: q, k, v and gate, up of each layer."""
        qkv = [[f"{layer}.{x}_proj" for x in "qkv"] for layer in self.attention_modules()]
        gate_up = [[f"layers.{i}.mlp.{x}_proj" for x in ("gate", "up")] for i in range(self.num_layers)]
        return [stack for pair in zip(qkv, gate_up, strict=True) for stack in pair]

    def linear_shapes(self) -> dict[str, Shape]:
        """Rows and columns of every linear layer that recipes may name, by module, in the order of tensor_shapes.

        Embedding and lm_head are none, nor is what DFlash2 and DSpark add, which every quantiser leaves in BF16.
        """
        not_linear = (EMBEDDING, f"{HEAD}.weight", *self.dflash2_shapes(), *self.dspark_shapes())
        shapes = {name: s for name, s in self.tensor_shapes().items() if len(s) == 2 and name not in not_linear}
        return {name.removesuffix(".weight"): shape for name, shape in shapes.items()}

    def linear_modules(self) -> list[str]:
        """The linear layers, in the order of tensor_shapes."""
        return list(self.linear_shapes())

    def tensor_shapes(self) -> dict[str, Shape]:
        """Name and shape of every unquantised tensor: 11 L + 3, with attention_bias 15 L + 3, more by feature."""
        H, V = self.hidden_size, self.vocab_size or 0
        taps = range(len(self.target_layer_ids) if self.tap_norms else 0)
        shapes: dict[str, Shape] = {
            **{f"aux_hidden_norms.{tap}.weight": (self.tap_hidden_size or H,) for tap in taps},
            "fc.weight": (H, self.target_hidden_size),
            **({"fc.bias": (H,)} if self.has_bias("fc") else {}),
            "hidden_norm.weight": (H,),
            "norm.weight": (H,),
        }
        if self.own_embedding:
            shapes[EMBEDDING] = (V, H)
        if self.mask_embedding:
            shapes[MASK_EMBEDDING] = (H,)
        if self.draft_vocab_size is not None:
            shapes[f"{HEAD}.weight"] = (self.draft_vocab_size, H)
        if self.has_d2t:
            shapes[D2T] = (self.draft_vocab_size or 0,)
        for layer in range(self.num_layers):
            shapes |= self._layer_shapes(layer)
        return shapes | self.dflash2_shapes() | self.dspark_shapes()

    def dflash2_shapes(self) -> dict[str, Shape]:
        """The tensors of convolutions and selector, which every recipe leaves as they are."""
        H, shapes = self.hidden_size, dict[str, Shape]()
        if (conv := self.block_conv) is not None:
            names = [f"layers.{layer}.{name}" for layer in range(self.num_layers) for name in CONVOLVED.values()]
            rows = 2 * conv.kernel_size * (H // conv.group_size)
            shapes |= {f"{name}.base_kernel": (2, conv.kernel_size, H) for name in names}
            shapes |= {f"{name}.kernel_projection.weight": (rows, H) for name in names}
        if (selector := self.candidate_selector) is not None:
            codebooks = (f"{SELECTOR}.{name}_codebook" for name in ("predecessor", "successor"))
            shapes |= dict.fromkeys(codebooks, (self.vocab_size or 0, selector.rank))
            shapes[f"{SELECTOR}.hidden_projection.weight"] = (selector.rank, H)
        return shapes

    def dspark_shapes(self) -> dict[str, Shape]:
        """The tensors of Markov and confidence head, which every recipe leaves as they are."""
        if (head := self.markov_head) is None:
            return {}
        V, r, width = self.vocab_size or 0, head.rank, self.hidden_size + head.rank
        shapes: dict[str, Shape] = {
            f"{MARKOV}.markov_w1.weight": (V, r),
            f"{MARKOV}.markov_w2.weight": (head.num_rows or V, r),
        }
        if head.is_gated:
            shapes |= {f"{MARKOV}.gate_proj.weight": (r, width), f"{MARKOV}.gate_proj.bias": (r,)}
        if head.confidence:
            shapes |= {f"{CONFIDENCE}.proj.weight": (1, width), f"{CONFIDENCE}.proj.bias": (1,)}
        return shapes

    @property
    def has_own_head(self) -> bool:
        """Whether proposals come from an lm_head of the draft's own."""
        return self.draft_vocab_size is not None

    @property
    def own_vocabulary(self) -> list[str]:
        """What it has of embedding and lm_head in the place of the target's."""
        has_it = (self.own_embedding, self.mask_embedding, self.has_own_head)
        return [name for name, is_own in zip(("embed_tokens", MASK_EMBEDDING, HEAD), has_it, strict=True) if is_own]

    @property
    def has_d2t(self) -> bool:
        """Whether the own head has other rows than the vocabulary, and `d2t` to say which."""
        return self.draft_vocab_size not in (None, self.vocab_size)

    def _layer_shapes(self, layer: int) -> dict[str, Shape]:
        H, F, D, N = self.hidden_size, self.intermediate_size, self.head_dim, self.num_attention_heads
        q, kv = N * D, self.num_key_value_heads * D
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        projections: dict[str, Shape] = {
            f"{attention}.q_proj": (q, H),
            f"{attention}.k_proj": (kv, H),
            f"{attention}.v_proj": (kv, H),
            f"{attention}.o_proj": (H, q),
        }
        if self.attention_gate is not None:
            projections[f"{attention}.g_proj"] = (N if self.attention_gate == "per_head" else q, H)
        projections |= {f"{mlp}.gate_proj": (F, H), f"{mlp}.up_proj": (F, H), f"{mlp}.down_proj": (H, F)}
        biased = [name for name in projections if self.has_bias(name.rpartition(".")[2])]
        shapes = {f"{name}.weight": shape for name, shape in projections.items()}
        shapes |= {f"{name}.bias": projections[name][:1] for name in biased}
        shapes |= {f"{attention}.q_norm.weight": (D,), f"{attention}.k_norm.weight": (D,)}
        if not isinstance(self.layers, int) and self.layers[layer].sinks:
            shapes[f"{attention}.sinks"] = (N,)
        norms = (f"layers.{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
        return shapes | dict.fromkeys(norms, (H,))


class DraftSpec(PartialDraftSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All facts of a DFlash draft model, read from its config.json: narrows what may be unknown, adds nothing."""

    model_type: str
    layers: tuple[DraftLayer, ...]
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    vocab_size: int | None
    """None where the checkpoint does not say it: the target's, whatever that is."""
    mask_token_id: int
    num_target_layers: int | None
    """None where the checkpoint does not say it."""
    input_embedding_scale: float
