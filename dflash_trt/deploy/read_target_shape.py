# SPDX-License-Identifier: Apache-2.0
"""A target's layers as config.json describes them, or a CheckpointError for what is not modelled."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.target_cache import TargetCache, read_target_cache
from dflash_trt.deploy.target_shape import LatentHeads, TargetShape

STORED_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
MXFP4_BITS, FP8_BITS = 4.25, 8.0
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "muse_glimmer_text")
"""Model types whose attention layers gate the output of their heads."""
WIDE = ("gpt_oss", "mixtral", "minimax_m2")
"""Model types whose experts have the width `intermediate_size`."""
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
        raise facts.error("moe_layer_freq", "1: experts in every layer after the first ones")
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
