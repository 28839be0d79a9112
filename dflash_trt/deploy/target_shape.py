# SPDX-License-Identifier: Apache-2.0
"""Targets' layers: sizes, bits, and how many parameters follow; from config.json they are read, or refused."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.target_cache import TargetCache, read_target_cache


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
    """What its layers keep of a request: the kinds of its layers, and their bytes."""
    latent: LatentHeads | None = None
    has_output_gate: bool = False
    """Whether q brings a gate for what its heads give, and so is twice as wide (Qwen3-Next, Qwen3.5)."""
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
    def active_params(self) -> int:
        """Parameters that one token is multiplied with, without lm_head."""
        return self.dense_params + self.num_expert_layers * self.top_k * self.expert_params

    @property
    def weight_bytes(self) -> float:
        """All of the target, embedding included."""
        experts = self.num_expert_layers * self.num_experts * self.expert_params * self.expert_bits / 8
        return self.dense_params * self.weight_bits / 8 + experts + 2 * self.head_params * self.head_bits / 8


STORED_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
MXFP4_BITS, FP8_BITS = 4.25, 8.0
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "muse_glimmer_text")
"""Types of models whose attention layers gate what their heads give."""
WIDE = ("gpt_oss", "mixtral", "minimax_m2")
"""Types of models whose experts are as wide as `intermediate_size` says."""
NOT_MODELLED = ("num_attention_heads_per_layer", "gating", "hidden_size_per_layer_input")
"""Laguna's layers have heads and gates of their own, Gemma 4's small models embeddings of each layer."""


def read_target_shape(directory: Path) -> TargetShape:
    """From config.json alone; raises CheckpointError for layers that are not modelled, and for missing facts."""
    return shape_of(Facts.load(directory / "config.json"), str(directory))


def shape_of(facts: Facts, name: str) -> TargetShape:
    """The shape that `facts`, of a config.json, give a target."""
    quantized = facts
    if "text_config" in facts:
        facts = facts.section("text_config")
        quantized = facts if "quantization_config" in facts else quantized
    layers = facts.integer("num_hidden_layers")
    for key in NOT_MODELLED:
        if facts.values().get(key):
            raise facts.error(key, "a model without it; its layers are not modelled")
    cache = _cache(facts, layers)
    experts, top_k = _experts(facts)
    dtype = next((facts.text(key) for key in ("dtype", "torch_dtype") if key in facts), "bfloat16")
    bits = STORED_BITS.get(dtype, STORED_BITS["bfloat16"])
    expert_bits, weight_bits = _quantized_bits(quantized, bits)
    return TargetShape(
        target=name, num_layers=layers, hidden_size=facts.integer("hidden_size"),
        num_attention_heads=facts.integer("num_attention_heads"), cache=cache,
        latent=_latent(facts) if cache.is_latent else None,
        has_output_gate=facts.text("model_type") in GATED if "model_type" in facts else False,
        has_shared_values=facts.flag("attention_k_eq_v", default=False), vocab_size=facts.integer("vocab_size"),
        intermediate_size=_dense_width(facts, experts),
        num_dense_layers=_num_dense(facts, layers) if experts else 0, num_experts=experts, top_k=top_k,
        expert_intermediate_size=_expert_width(facts) if experts else 0,
        shared_intermediate_size=_shared_width(facts) if experts else 0, expert_bits=expert_bits,
        weight_bits=weight_bits, head_bits=bits,
    )  # fmt: skip


def _cache(facts: Facts, layers: int) -> TargetCache:
    cache = read_target_cache(facts, layers)
    counted = 0
    if cache is not None:
        counted = cache.num_full_layers + cache.num_sliding_layers
        counted += cache.recurrent.num_layers if cache.recurrent else 0
    if cache is None or counted != layers:
        key = "layer_types" if "layer_types" in facts else "model_type"
        raise facts.error(
            key, "layers of full, sliding or latent attention or gated delta nets, each with a cache of its own;"
            " others are not modelled",
        )  # fmt: skip
    return cache


def _latent(facts: Facts) -> LatentHeads:
    return LatentHeads(
        q_lora_rank=facts.optional("q_lora_rank", facts.integer) or 0,
        **{name: facts.integer(name) for name in LatentHeads.__struct_fields__ if name != "q_lora_rank"},
    )


def _experts(facts: Facts) -> tuple[int, int]:
    """Experts of a layer and the number that a token takes; 0, 0 for a dense target."""
    experts = next((count for key in EXPERT_COUNTS if (count := facts.optional(key, facts.integer))), 0)
    if not experts:
        return 0, 0
    return experts, facts.integer("top_k_experts" if "top_k_experts" in facts else "num_experts_per_tok")


def _expert_width(facts: Facts) -> int:
    is_wide = "model_type" in facts and facts.text("model_type") in WIDE
    return facts.integer("intermediate_size" if is_wide else "moe_intermediate_size")


def _dense_width(facts: Facts, experts: int) -> int:
    """Width of the MLPs in layers without experts."""
    has_some = not experts or _num_dense(facts, facts.integer("num_hidden_layers"))
    return facts.integer("intermediate_size") if has_some else 0


def _shared_width(facts: Facts) -> int:
    """Width of the MLP beside the experts: Qwen's and DeepSeek's shared experts, Gemma 4's own MLP; or 0."""
    if (width := facts.optional("shared_expert_intermediate_size", facts.integer)) is not None:
        return width
    if "n_shared_experts" in facts:
        count = facts.optional("n_shared_experts", lambda key: facts.integer(key, minimum=0)) or 0
        return count * _expert_width(facts)
    return facts.integer("intermediate_size") if facts.flag("enable_moe_block", default=False) else 0


def _num_dense(facts: Facts, layers: int) -> int:
    """Layers without experts: the first ones (DeepSeek), or those that Qwen's list and step leave."""
    if "moe_layer_freq" in facts and facts.integer("moe_layer_freq") != 1:
        raise facts.error("moe_layer_freq", "1: experts in every layer behind the first ones")
    if "first_k_dense_replace" in facts:
        return facts.integer("first_k_dense_replace", minimum=0, maximum=layers)
    dense = facts.integers("mlp_only_layers") if facts.values().get("mlp_only_layers") else ()
    step = facts.integer("decoder_sparse_step") if "decoder_sparse_step" in facts else 1
    return sum(index in dense or (index + 1) % step != 0 for index in range(layers))


def _quantized_bits(facts: Facts, bits: float) -> tuple[float, float]:
    """Bits of a weight of experts, and of attention and dense MLPs, from `quantization_config`."""
    if facts.optional("quantization_config", facts.section) is None:
        return bits, bits
    config = facts.section("quantization_config")
    method = config.text("quant_method", choices=("mxfp4", "fp8", "compressed-tensors"))
    if method == "fp8":
        return FP8_BITS, FP8_BITS
    return (MXFP4_BITS if method == "mxfp4" else _packed_bits(config)), bits


def _packed_bits(config: Facts) -> float:
    """Bits of expert weights packed by compressed-tensors (Kimi's INT4), scales included."""
    groups = config.section("config_groups")
    if len(groups.keys()) != 1 or not any("self_attn" in name for name in config.texts("ignore")):
        raise config.error("ignore", "one group of weights, the experts', and self_attn left out")
    weights = groups.section(*groups.keys()).section("weights")
    return weights.integer("num_bits") + STORED_BITS["bfloat16"] / weights.integer("group_size")
