# SPDX-License-Identifier: Apache-2.0
"""A small random model of every causal language model that transformers has, and why some are not made."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.reference.synthetic import DraftSizes

WINDOW = 8
DRAFT_SIZES = DraftSizes(hidden=32, intermediate=48, vocab_size=64, num_taps=2, num_target_layers=4)
NUM_LAYERS = DRAFT_SIZES.num_target_layers
SIZES: dict[str, Any] = {
    **{"vocab_size": DRAFT_SIZES.vocab_size, "hidden_size": DRAFT_SIZES.hidden, "num_hidden_layers": NUM_LAYERS},
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    **{"initializer_range": 0.3, "sliding_window": WINDOW, "sliding_window_size": WINDOW, "is_decoder": True},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "n_shared_experts": 1, "shared_expert_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_token": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "chunk_size": 4,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 2,
        "rotary_dim": 8,
    },
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1},
    **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4},  # of two heads, scores are often 0, which is a tie
}
"""Facts that are given wherever a configuration has them. Attention is far from uniform at this initializer_range."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
GEMMA_4 = {
    **{"hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 24, "num_key_value_heads": 2},
    **{"num_attention_heads": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "electra": {"embedding_size": 32}, "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "hrm_text": {"initializer_range": 0.05},  # 32 recurrent layers, which at 0.3 turn 1e-6 into 1e-3
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 8},
        **{"activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_text": GEMMA_4, "gemma4_unified_text": GEMMA_4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": HYBRID,
    "helium": {"head_dim": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 64}, "inkling2_text": {"unpadded_vocab_size": 64},
    "inkling_text": {"unpadded_vocab_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {
        **{"hc_count": 3, "hc_lowrank": 8, "layer_types": ["linear_attention", "indexed_attention"] * 2},
        **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "glm5_next_text": {
        **{"qk_rope_head_dim": 0, "layer_types": ["linear_attention", "indexed_attention"] * 2},
        **{"index_kpool": 2, "pad_token_id": 0, "mlp_layer_types": ["dense", "sparse"] * 2},
        "indexer_types": ["full"] * 4,
    },
    "mistral_large4_text": {"num_key_value_heads": 4},
}  # fmt: skip
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
SMALL_VISION |= {
    "num_attention_heads": 2,
    "text_hidden_size": 32,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}
MULTIMODAL = {"glm5_next": "glm5_next_text", "mistral_large4": "mistral_large4_text", "inkling2": "inkling2_text"}
"""Models that transformers has below images only, and their language models."""


def small_config(model_type: str) -> Any:
    """The default configuration with `SIZES` and `OVERRIDES`."""
    if model_type in MULTIMODAL:
        vision = CONFIG_MAPPING[model_type]().vision_config
        facts = {key: value for key, value in SMALL_VISION.items() if _can_be_given(vision, key)}
        return CONFIG_MAPPING[model_type](
            text_config=small_config(MULTIMODAL[model_type]).to_dict(), vision_config=type(vision)(**facts).to_dict()
        )
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    facts = {key: value for key, value in SIZES.items() if _can_be_given(default, key)}
    if "kv_lora_rank" in facts:  # heads of latent attention share no keys and have two parts
        facts["num_key_value_heads"] = facts["num_attention_heads"]
        facts.pop("head_dim", None)
    if _can_be_given(default, "layer_types") and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        facts["layer_types"] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
    return config_class(**(facts | OVERRIDES.get(model_type, {})))


def _can_be_given(config: Any, key: str) -> bool:
    """Whether a configuration has a key that is not computed from others."""
    key = type(config).attribute_map.get(key, key)
    own = getattr(type(config), key, None)
    return key in config.to_dict() and not (isinstance(own, property) and own.fset is None)


def num_parameters(model_type: str) -> int:
    """Size of the model that `random_model` would make."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _from_config(model_type).parameters())


def random_model(model_type: str) -> PreTrainedModel:
    """With weights so large that attention is far from uniform, and no two norms or sinks alike."""
    torch.manual_seed(0)
    model = _from_config(model_type)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def _from_config(model_type: str) -> PreTrainedModel:
    maker = AutoModelForImageTextToText if model_type in MULTIMODAL else AutoModelForCausalLM
    model: PreTrainedModel = maker.from_config(small_config(model_type), attn_implementation="eager")
    return model
