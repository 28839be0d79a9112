# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json from which nothing of a draft is computed, whatever their values.

They were collected from the configurations of transformers 4 and 5 (PretrainedConfig, and those of the models whose
config.json drafts are made from), z-lab, Model Optimizer, SpecForge, DeepSpec, NeMo AutoModel and Speculators.
"""

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
