# SPDX-License-Identifier: Apache-2.0
"""`DraftSpec`: the facts of a draft model, the only list of them, and what follows from them."""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.rope import Rope


class DraftLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one layer's attention may see besides the context."""

    sliding_window: int | None
    """Visible distance in tokens: |q - k| < sliding_window; None sees everything."""
    causal: bool
    """Whether a block slot is blind to the slots after it."""


class PartialDraftSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """The target's vocabulary: the draft borrows its embedding and lm_head."""
    block_size: int
    """S: the last verified token and S - 1 mask tokens."""
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...]
    """The taps: tap i is the target's residual stream after decoder layer i."""
    num_target_layers: int | None = None
    """Decoder layers of the target it was trained for, where the checkpoint says so."""
    input_embedding_scale: float | None = None
    """Multiplies the block's embeddings (Gemma: sqrt(hidden_size)), 1 where the checkpoint has none."""

    @property
    def num_layers(self) -> int:
        """L."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    @property
    def num_draft_tokens(self) -> int:
        """K: proposals per block."""
        return self.block_size - 1

    @property
    def target_hidden_size(self) -> int:
        """Width of one row of taps, A * H."""
        return len(self.target_layer_ids) * self.hidden_size

    def context_bytes_per_token(self, *, fp8: bool, ranks: int = 1) -> int:
        """Bytes of injected K and V per context token, all layers, in an FP8 or a BF16 cache, on one of `ranks`."""
        heads = -(-self.num_key_value_heads // ranks)  # a head is never split
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

    def linear_shapes(self) -> dict[str, tuple[int, ...]]:
        """Rows and columns of every linear layer, by module, in the order of tensor_shapes."""
        return {name.removesuffix(".weight"): s for name, s in self.tensor_shapes().items() if len(s) == 2}

    def linear_modules(self) -> list[str]:
        """The linear layers, in the order of tensor_shapes."""
        return list(self.linear_shapes())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every unquantised tensor: 11 L + 3, and with biases 15 L + 3."""
        H, F, D = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * D, self.num_key_value_heads * D
        projections = {"q_proj": (q, H), "k_proj": (kv, H), "v_proj": (kv, H), "o_proj": (H, q)}
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (H, self.target_hidden_size),
            "hidden_norm.weight": (H,),
            "norm.weight": (H,),
        }
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}"
            for name, (rows, columns) in projections.items():
                shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, columns)
                if self.attention_bias:
                    shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (D,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (D,)
            shapes[f"{prefix}.input_layernorm.weight"] = (H,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (H,)
            shapes[f"{prefix}.mlp.gate_proj.weight"] = (F, H)
            shapes[f"{prefix}.mlp.up_proj.weight"] = (F, H)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (H, F)
        return shapes


class DraftSpec(PartialDraftSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All facts of a DFlash draft model, read from its config.json: narrows what may be unknown, adds nothing."""

    model_type: str
    layers: tuple[DraftLayer, ...]
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    vocab_size: int
    mask_token_id: int
    num_target_layers: int | None
    """None where the checkpoint does not say it."""
    input_embedding_scale: float
