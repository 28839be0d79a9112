# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and published checkpoints of many families, and results of their own attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment
from tests.reference.synthetic import DraftSizes

VOCAB_SIZE = 64
WINDOW = 8
NUM_SLOTS = 4
TAPS = (0, 2)
COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048},
    **{"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
LLAMA_3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MLA = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"head_dim": 8, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1},
}

GEMMA_4: dict[str, Any] = {
    **{"sliding_window": WINDOW, "layer_types": ALTERNATING, "global_head_dim": 24, "final_logit_softcapping": 2.0},
    "hidden_size_per_layer_input": 0,
}
PER_LAYER_EMBEDDINGS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", MLA | ROUTED),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9}),
    "gemma3_text": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "gemma4": ("gemma4_text", GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": ("gemma4_text", GEMMA_4 | {"enable_moe_block": True, "top_k_experts": 2, **EXPERTS}),
    "gemma4-small": ("gemma4_text", GEMMA_4 | {"num_kv_shared_layers": 2, **PER_LAYER_EMBEDDINGS}),
    "glm4_moe": ("glm4_moe", ROUTED | {"moe_intermediate_size": 16, "n_shared_experts": 1, "use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW, **EXPERTS}),
    "laguna": ("laguna", EXPERTS | {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA_3_ROPE}),
    "llama-biased": ("llama", {"attention_bias": True, "num_key_value_heads": 4}),
    "minimax_m2": ("minimax_m2", EXPERTS),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16}),
}
SEQUENTIAL_MODELS = {name: PACKED[name] for name in ("qwen3_next", "qwen3_5", "gpt_oss", "gemma3_text", "deepseek_v3")}


def random_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """With weights so large that attention is far from uniform, and no two norms or sinks alike."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(COMMON | settings))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def family_model(name: str) -> PreTrainedModel:
    """A model of those that packed and sequential targets are compared on."""
    model_type, settings = PACKED[name]
    return random_model(model_type, **settings)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A pass, and how many tokens of each of its segments are taken back; then slots that are emptied."""

    segments: list[Segment]
    taken_back: list[int]
    released: list[int]


def random_history(seed: int, num_turns: int = 5, longest: int = 13, *, vocab_size: int = VOCAB_SIZE) -> list[Turn]:
    """Ragged segments in any order of slots, now and then equally long ones of neighbours in order."""
    rng = random.Random(seed)
    turns = []
    for turn in range(num_turns):
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        lengths = [rng.choice((1, 4, rng.randint(1, longest))) for _ in slots]
        if turn % 3 == 1:
            slots, lengths = sorted(slots), [rng.randint(1, 5)] * len(slots)
        segments = [
            Segment(slot=slot, token_ids=[rng.randrange(vocab_size) for _ in range(n)], num_logits=rng.randint(0, n))
            for slot, n in zip(slots, lengths, strict=True)
        ]
        taken_back = [rng.choice((0, rng.randint(0, n - 1))) for n in lengths]
        turns.append(Turn(segments=segments, taken_back=taken_back, released=[s for s in slots if rng.random() < 0.1]))
    return turns


Results = list[tuple[torch.Tensor, torch.Tensor]]
"""Logits and taps of each pass."""


def computed(target: HuggingFaceTarget, turns: Sequence[Turn]) -> Results:
    results = []
    for turn in turns:
        verified = target.verify(turn.segments, with_taps=True)
        results.append((verified.logits.clone(), verified.taps.clone()))
        for segment, num_tokens in zip(turn.segments, turn.taken_back, strict=True):
            target.rollback(segment.slot, num_tokens)
        for slot in turn.released:
            target.release(slot)
    return results


@torch.inference_mode()
def recomputed(model: PreTrainedModel, turns: Sequence[Turn]) -> Results:
    """Each sequence as a whole, without a cache."""
    sequences: dict[int, list[int]] = {slot: [] for slot in range(NUM_SLOTS)}
    results = []
    for turn in turns:
        logits, taps = [], []
        for segment, num_tokens in zip(turn.segments, turn.taken_back, strict=True):
            sequence = sequences[segment.slot]
            sequence += segment.token_ids
            output = model(torch.tensor([sequence]), use_cache=False, output_hidden_states=True)
            logits.append(output.logits[0, len(sequence) - segment.num_logits :])
            hidden = torch.cat([output.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
            taps.append(hidden[-len(segment.token_ids) :])
            del sequence[len(sequence) - num_tokens :]
        for slot in turn.released:
            sequences[slot].clear()
        results.append((torch.cat(logits), torch.cat(taps)))
    return results


def relative_error(found: Results, expected: Results) -> float:
    """The largest over all passes, of logits and taps."""
    errors = [0.0]
    for pair in zip(found, expected, strict=True):
        for ours, theirs in zip(*pair, strict=True):
            assert ours.shape == theirs.shape
            if theirs.numel():
                errors.append(float((ours - theirs).abs().max() / theirs.abs().max()))
    return max(errors)


SIZES = DraftSizes(vocab_size=VOCAB_SIZE)
PUBLISHED: dict[str, Any] = {
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
PUBLISHED_GEMMA_4 = SLIDING | {
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
            "text_config": {"model_type": "gemma4_text", **PUBLISHED_GEMMA_4},
            "vision_config": SMALL | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
        },
    ),
    "gemma4-moe": (
        "Gemma4ForConditionalGeneration",
        {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **PUBLISHED_GEMMA_4, **GEMMA_4_MOE}},
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
    return {
        key: value for key, value in (PUBLISHED | facts).items() if key != "head_dim" or "kv_lora_rank" not in facts
    }
