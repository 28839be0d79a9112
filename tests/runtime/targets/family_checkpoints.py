# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of every family that DFlash drafters exist for, in the layout that is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from tests.oracle.random_pairs import VOCAB_SIZE
from tests.reference.synthetic import DraftSizes
from tests.runtime.targets.families import EXPERTS, LINEAR, LLAMA_3_ROPE, MLA, ROUTED, WINDOW

SIZES = DraftSizes(vocab_size=VOCAB_SIZE)
COMMON: dict[str, Any] = {
    **{"vocab_size": SIZES.vocab_size, "hidden_size": SIZES.hidden, "intermediate_size": SIZES.intermediate},
    **{"num_hidden_layers": SIZES.num_target_layers, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
HYBRID: dict[str, Any] = LINEAR | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 16}
INTERLEAVED = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
QWEN_3_5 = HYBRID | {"rope_parameters": HYBRID["rope_parameters"] | INTERLEAVED}
DEEPSEEK = {key: value for key, value in (MLA | ROUTED).items() if key != "head_dim"}
GEMMA_4 = SLIDING | {
    **{"global_head_dim": 24, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    **{"final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0},
}
GEMMA_4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
QWEN_VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": SIZES.hidden},
    "num_position_embeddings": 16,
}

SEQUENTIAL = ("muse-glimmer",)
"""Families that run one request after the other."""
Family = tuple[str, dict[str, Any]]
"""A class of transformers, and its configuration; `text_config` holds the language model's where it is nested."""
FAMILIES: dict[str, Family] = {
    "qwen3": ("Qwen3ForCausalLM", {"model_type": "qwen3"}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", **EXPERTS}),
    "qwen3-next": ("Qwen3NextForCausalLM", {"model_type": "qwen3_next", **HYBRID, **SHARED_EXPERT}),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", **QWEN_3_5},
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text", **QWEN_3_5, **SHARED_EXPERT},
            "vision_config": QWEN_VISION,
        },
    ),
    "llama": ("LlamaForCausalLM", {"model_type": "llama", "rope_parameters": LLAMA_3_ROPE}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", **SLIDING, "query_pre_attn_scalar": 16},
            "vision_config": SMALL | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "model_type": "gemma4",
            "text_config": {"model_type": "gemma4_text", **GEMMA_4},
            "vision_config": SMALL | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
        },
    ),
    "gemma4-moe": (
        "Gemma4ForConditionalGeneration",
        {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **GEMMA_4, **GEMMA_4_MOE}},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {"model_type": "deepseek_v3", **DEEPSEEK}),
    "kimi-k2.5": (
        "Kimi_K25ForConditionalGeneration",
        {
            "model_type": "kimi_k25",
            "text_config": {"model_type": "kimi_k2", **DEEPSEEK},
            "vision_config": SMALL | {"model_type": "kimi_k25_vision"},
            **{"projection_hidden_size": 16, "image_token_id": 163605, "tie_word_embeddings": False},
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", {"model_type": "gpt_oss", **EXPERTS, "sliding_window": WINDOW}),
    "muse-glimmer": (
        "MuseGlimmerForConditionalGeneration",
        {
            "model_type": "muse_glimmer",
            "text_config": {"model_type": "muse_glimmer_text", **SLIDING},
            "vision_config": SMALL | {"model_type": "muse_glimmer_vision", "pos_emb_height": 4, "pos_emb_width": 4},
        },
    ),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {"model_type": "minimax_m2", **EXPERTS}),
}


def write_family(path: Path, name: str) -> PreTrainedModel:
    """Writes config.json and weights into `path`; the model as it was written, with transformers' own attention."""
    class_name, facts = FAMILIES[name]
    facts = dict(facts)
    if "text_config" in facts:
        facts["text_config"] = _text_facts(facts["text_config"])
    else:
        facts = _text_facts(facts)
    torch.manual_seed(1)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, class_name)(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.eval().save_pretrained(path)
    return model


def _text_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Latent attention has no head_dim: its heads have parts with and without rotation."""
    return {key: value for key, value in (COMMON | facts).items() if key != "head_dim" or "kv_lora_rank" not in facts}
