# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many families, and what their own attention makes of a random history of passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_trt.runtime.targets.huggingface import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment

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
KIMI_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"] * 2, "moe_intermediate_size": 16},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4},
    **{"linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def random_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """With weights so large that attention is far from uniform, and no two norms or sinks alike."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(COMMON | settings))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A pass, and how many tokens of each of its segments are taken back; then slots that are emptied."""

    segments: list[Segment]
    taken_back: list[int]
    released: list[int]


def random_history(seed: int, num_turns: int = 12, longest: int = 13, *, vocab_size: int = VOCAB_SIZE) -> list[Turn]:
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
