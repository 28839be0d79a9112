# SPDX-License-Identifier: Apache-2.0
"""Checks config.json once all facts are read: keys that nothing has read, and facts that are stated twice.

Runtimes do not read the same statement of a fact: vLLM 0.33 takes eagle_aux_hidden_state_layer_ids before
target_layer_ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import CONFLICT, Facts
from dflash_trt.errors import CheckpointError, cut

# Collected from the configurations of transformers 4 and 5 (PretrainedConfig, and those of the models whose config.json
# drafts are made from), z-lab, Model Optimizer, SpecForge, DeepSpec, NeMo AutoModel and Speculators.
TRANSFORMERS = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention",
    "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initial_context_length", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "max_length", "max_window_layers", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",
    "return_dict_in_generate", "sep_token_id", "sliding_window", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
}  # fmt: skip
"""Names, special tokens, generation, initialisation, dropout, and a window that no layer has."""
EXPERTS = {
    "aux_loss_alpha", "decoder_sparse_step", "ep_size", "experts_per_token", "first_k_dense_replace", "mlp_layer_types",
    "mlp_only_layers", "moe_apply_router_weight_on_input", "moe_intermediate_size", "moe_layer_freq",
    "moe_routed_scaling_factor", "moe_router_logit_softcapping", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts", "num_nextn_predict_layers",
    "output_router_logits", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise", "scoring_func",
    "seq_aux", "shared_expert_intermediate_size", "swiglu_alpha", "swiglu_limit", "topk_group", "topk_method",
}  # fmt: skip
"""Experts of the target whose config.json was copied; a draft's own would be tensors that are refused."""
TRAINING = {
    "anchor_sampling", "block_keep_prob", "ce_loss_alpha", "confidence_head_alpha", "confidence_loss_alpha",
    "confidence_loss_weight", "distillation_alpha", "dpace_alpha", "draft_attention_backend",
    "has_no_defaults_at_init", "l1_loss_alpha", "learning_rate", "loss_decay_factor", "loss_decay_gamma",
    "loss_objective", "loss_type", "max_anchors", "num_anchors", "selector_loss_alpha", "selector_loss_weight",
    "self_logit_distillation", "speculators_config", "speculators_version", "train_embed_tokens", "warmup_ratio",
}  # fmt: skip
"""Losses, schedules and sampling of training, and who trained for whom."""
CHECKED_ELSEWHERE = {"architectures", "model_type", "quantization_config"}
"""Keys that choose the dialect, and the section that is compared with the tensors."""
ALLOWED = TRANSFORMERS | EXPERTS | TRAINING | CHECKED_ELSEWHERE
SECTION = "dflash_config"
BACKBONE = "transformer_layer_config"
ROTARY = ("rope_parameters", "rope_scaling")
PLAIN: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,), "attention_mode": ("gqa", "mha"), "logit_scale": (1,), "mlp_bias": (False,),
    "norm_before_fc": (False,), "norm_before_residual": (False,), "projector_type": ("dflash", "dflash2", "dspark"),
    "shift_label": (False,), "use_aux_hidden_state": (True,), "use_qk_norm": (True,),
}  # fmt: skip
"""Values that change nothing, by key."""
ROTARY_KEYS = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "low_freq_factor",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "truncate", "type",
}  # fmt: skip
"""Keys that a rotary section may hold, whatever its type uses; for text, the axes of M-RoPE agree."""


def refuse_unread(config: Facts) -> None:
    """Raises CheckpointError for the first unread key of `config` that may be a fact; all facts must be read before."""
    for place in (config, *_sections(config, BACKBONE)):
        for key in place.unread():
            if key not in (SECTION, *ROTARY):
                _refuse_unless_plain(place, key)
        for name in ROTARY:
            for section in _sections(place, name):
                for key in sorted(section.keys() - ROTARY_KEYS):
                    raise _unknown(section, key)
    for section in _sections(config, SECTION):
        for key in section.unread():
            _refuse_unless_plain(section, key)


def _refuse_unless_plain(place: Facts, key: str) -> None:
    if key in ALLOWED:
        return
    if key not in PLAIN:
        raise _unknown(place, key)
    if not any(place.holds(key, value) for value in PLAIN[key]):
        raise place.error(key, " or ".join(json.dumps(value) for value in PLAIN[key]) + ", which is what is computed")


def _unknown(place: Facts, key: str) -> CheckpointError:
    hint = f"if nothing is computed from {cut(key)}, remove it from config.json"
    return place.error(key, "only keys that are computed or known to change nothing", hint)


def _sections(place: Facts, name: str) -> list[Facts]:
    return [place.section(name)] if place.peek(name) else []


SECTIONS = ("dflash_config", "dspark_config", "eagle_config")


def _taps(spec: DraftSpec) -> list[int]:
    return list(spec.target_layer_ids)


def _entered_layers(spec: DraftSpec) -> list[int]:
    """The taps by the layer that they enter, one more than the layer that they leave."""
    return [tap + 1 for tap in spec.target_layer_ids]


RESTATED: dict[str, Callable[[DraftSpec], object]] = {
    "target_layer_ids": _taps,
    "dspark_target_layer_ids": _taps,
    "eagle_aux_hidden_state_layer_ids": _entered_layers,
    "aux_hidden_state_layer_ids": _entered_layers,
    "num_aux_layers": lambda spec: len(spec.target_layer_ids),
    "num_aux_hidden_states": lambda spec: len(spec.target_layer_ids),
    "mask_token_id": lambda spec: spec.mask_token_id,
    "pard_token": lambda spec: spec.mask_token_id,
    "dspark_noise_token_id": lambda spec: spec.mask_token_id,
    "num_target_layers": lambda spec: spec.num_target_layers,
    "target_num_hidden_layers": lambda spec: spec.num_target_layers,
    "block_size": lambda spec: spec.block_size,
    "dspark_block_size": lambda spec: spec.block_size,
    "target_hidden_size": lambda spec: spec.tap_hidden_size or spec.hidden_size,
}
"""Value of each key that states a fact, by the fact."""


def check_restated(config: Facts, spec: DraftSpec) -> None:
    """Raises CheckpointError, with both values, for a key that contradicts the fact that was read; it counts as read.

    A fact that is stated once and nowhere else is not compared with itself: `spec` has its value.
    """
    for place in _places(config):
        for key, value_of in RESTATED.items():
            value = value_of(spec)
            if key not in place or value is None or place.equals(key, value):
                continue
            raise CheckpointError(
                f"{config.file}: {place.path(key)} is {cut(json.dumps(place.values()[key]))}, but the other keys of"
                f" this fact mean {json.dumps(value)} there",
                hint=CONFLICT,
            )


def _places(config: Facts) -> Iterator[Facts]:
    yield config
    for name in SECTIONS:
        if config.peek(name):
            yield config.section(name)
