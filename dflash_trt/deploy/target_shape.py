# SPDX-License-Identifier: Apache-2.0
"""Layers of a target: sizes, bits, and the numbers of parameters that follow."""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.target_cache import TargetCache


class LatentHeads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths of multi-head latent attention, as DeepSeek V3's config.json names them."""

    q_lora_rank: int
    """0: q is one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target: layers of attention (full, sliding, latent) or gated delta nets, and of dense MLPs or experts."""

    target: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    cache: TargetCache
    """Kinds of layers, and the bytes that each keeps of a request."""
    latent: LatentHeads | None = None
    has_output_gate: bool = False
    """Whether q also projects an output gate, and so is twice as wide (Qwen3-Next, Qwen3.5)."""
    linear_gate_rank: int = 0
    """Rank of a delta net's two channel gates (Kimi delta attention); 0: z, and two gates a head."""
    has_shared_values: bool = False
    """Whether full layers take their keys for values, too (Gemma 4)."""
    vocab_size: int
    intermediate_size: int
    """Width of the MLP in layers without experts."""
    num_dense_layers: int = 0
    """Layers without experts, where others have them."""
    num_experts: int = 0
    """Experts of each other layer; 0: the target is dense."""
    top_k: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of the shared MLP beside the experts, which every token passes."""
    expert_bits: float = 16
    weight_bits: float = 16
    """Bits of a weight of attention and dense MLPs."""
    head_bits: float = 16
    """Bits of a weight of embedding and lm_head."""
    num_mtp_layers: int | None = None
    """Multi-token-prediction layers, which the other counts leave out; None where it is not known."""

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_linear_layers(self) -> int:
        """Gated delta nets."""
        return self.cache.recurrent.num_layers if self.cache.recurrent else 0

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_linear_layers

    @property
    def attention_params(self) -> int:
        """Parameters of the projections that ranks share: q, k, v and o, and a delta net's."""
        H, N, cache = self.hidden_size, self.num_attention_heads, self.cache
        if (heads := self.latent) is not None:
            queries = N * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
            latent = heads.kv_lora_rank * N * (heads.qk_nope_head_dim + heads.v_head_dim)
            layer = (heads.q_lora_rank or H) * queries + latent + N * heads.v_head_dim * H
            return self.num_attention_layers * layer + self._linear_params
        full = (cache.full_key_value_heads or cache.num_key_value_heads, cache.full_head_dim or cache.head_dim)
        sliding = (cache.num_key_value_heads, cache.head_dim)
        total = self._linear_params
        for layers, (groups, head_dim) in ((cache.num_full_layers, full), (cache.num_sliding_layers, sliding)):
            total += layers * H * head_dim * ((2 + self.has_output_gate) * N + 2 * groups)
        return total - self.has_shared_values * cache.num_full_layers * H * full[0] * full[1]

    @property
    def replicated_attention_params(self) -> int:
        """Parameters that every rank keeps whole: latent attention's down projections, which all heads share."""
        if self.latent is None:
            return 0
        width = self.latent.q_lora_rank + self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return self.num_attention_layers * self.hidden_size * width

    @property
    def _linear_params(self) -> int:
        """Parameters of the delta nets: q, k, v, output and gates."""
        if (state := self.cache.recurrent) is None:
            return 0
        H, rank, heads = self.hidden_size, self.linear_gate_rank, state.num_value_heads
        keys, values = state.num_key_heads * state.key_head_dim, heads * state.value_head_dim
        gates = H * heads + 2 * rank * (H + values) if rank else H * (values + 2 * heads)
        return state.num_layers * (H * (2 * keys + 2 * values) + gates)

    def attention_flops(self, tokens: float, rows: float, ranks: int, *, is_prompt: bool) -> float:
        """Flops of `tokens` that each see `rows` rows, summed over layers, on one of `ranks` ranks.

        Latent attention decodes on the rows as they are kept, whose heads are wide; prompts are widened first.
        """
        queries = -(-self.num_attention_heads // ranks)
        if self.latent is None:
            return 4 * tokens * rows * queries * (self.cache.full_head_dim or self.cache.head_dim)
        if is_prompt:
            widths = self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim + self.latent.v_head_dim
        else:
            widths = 2 * self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return 2 * tokens * rows * queries * widths

    @property
    def mlp_params(self) -> int:
        """Parameters of all dense MLPs, including those beside experts."""
        dense = (self.num_layers - self.num_expert_layers) * self.intermediate_size
        return 3 * self.hidden_size * (dense + self.num_expert_layers * self.shared_intermediate_size)

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def dense_params(self) -> int:
        """Parameters except experts and vocabulary; without norms, biases, routers, convolutions and indices."""
        return self.attention_params + self.replicated_attention_params + self.mlp_params

    @property
    def weight_bytes(self) -> float:
        """All of the target, embedding included."""
        experts = self.num_expert_layers * self.num_experts * self.expert_params * self.expert_bits / 8
        return self.dense_params * self.weight_bits / 8 + experts + 2 * self.head_params * self.head_bits / 8
