# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM's Python API that mean nothing here: taken where they change nothing, else named as ours.

Read in vLLM 0.33.0 (wheel of the package index): vllm/entrypoints/llm.py, engine/arg_utils.py, sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.errors import RequestError, shown

Accepted = Mapping[str, tuple[object, ...]]
"""By name the values that change nothing; None is one for each."""

RENAMED = {"model": "engine", "max_num_seqs": "max_batch_size", "spec_tokens": "draft_length"}
"""Arguments of LLM that ours has by another name."""
LLM_ARGUMENTS: Accepted = {
    **dict.fromkeys(
        (
            "tokenizer", "allowed_media_domains", "quantization", "revision", "tokenizer_revision", "chat_template",
            "offload_params", "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config",
            "structured_outputs_config", "profiler_config", "attention_config", "kv_cache_memory_bytes",
            "compilation_config", "quantization_config", "logits_processors", "spec_method", "spec_model",
            "speculative_config", "max_model_len", "max_num_batched_tokens", "block_size", "download_dir",
            "distributed_executor_backend",
        ),
        (),
    ),
    **dict.fromkeys(("runner", "convert", "tokenizer_mode", "load_format", "kv_cache_dtype"), ("auto",)),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(
        (
            "skip_tokenizer_init", "trust_remote_code", "enable_return_routed_experts", "return_sampling_mask",
            "enable_lora", "enable_expert_parallel",
        ),
        (False,),
    ),
    **dict.fromkeys(("enforce_eager", "disable_custom_all_reduce", "disable_log_stats"), (False, True)),
    "enable_chunked_prefill": (True,),
    "async_scheduling": (False,),
    "allowed_local_media_path": ("",),
    "seed": (0,),
    "gpu_memory_utilization": (0.92, 0.9),
    "cpu_offload_gb": (0, 0.0),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
}  # fmt: skip
REQUEST_ARGUMENTS: Accepted = {
    "lora_request": (),
    "priority": (0,),
    "tokenization_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "chat_template_content_format": ("auto", "string"),
    "prompt_token_ids": (),
}
"""Of generate and chat."""
SETTINGS: Accepted = {
    "watermarking": (False,),
    "min_tokens": (0,),
    "prompt_logprob_token_ids": (),
    "prompt_logprob_start": (),
    "logprob_token_ids": (),
    "flat_logprobs": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "output_kind": (),
    "stream_interval": (1,),
    "skip_clone": (False, True),
    "output_text_buffer_length": (0,),
    "allowed_token_ids": (),
    "extra_args": ({},),
    "bad_words": ([],),
    "skip_reading_prefix_cache": (False,),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (),
}
"""Of SamplingParams."""
OURS = {
    "tensor_parallel_size": "dflash-trt generate --tp N joins ranks",
    "tokenizer": "target: its directory holds the tokenizer",
    "max_model_len": "max_tokens of SamplingParams; the target's positions are the limit",
    "quantization": "dflash-trt build --recipe quantises the draft",
    "num_speculative_tokens": "draft_length",
    "gpu_memory_utilization": "cache_gib, in GiB",
    "kv_cache_memory_bytes": "cache_gib, in GiB",
    "max_num_batched_tokens": "prefill_chunk",
    "speculative_config": "the engine is the drafter; draft_length says how many tokens it drafts",
    "seed": "seed of SamplingParams",
    "chat_template": "chat_template of LLM.chat",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "prompt_token_ids": "prompts: token ids in a list",
    "priority": "leave it out: requests are served in their order",
    "min_tokens": "ignore_eos=True answers to max_tokens",
    "guided_decoding": "structured_outputs=Grammar(...)",
    "bad_words": "logit_bias={token: -100}",
    "output_kind": "LLM.stream answers step by step",
    "detokenize": "token_ids of the Completion",
    "skip_special_tokens": "token_ids of the Completion",
}
"""Ours, for what vLLM calls otherwise."""


def refuse_others(given: Mapping[str, object], accepted: Accepted, owner: str, otherwise: str) -> None:
    """RequestError for the first argument that asks for something; its hint is our name for it, or `otherwise`."""
    for name, value in given.items():
        hint = OURS.get(name, otherwise)
        if name not in accepted:
            raise RequestError(f"{name}: {owner} has no such argument", hint=hint)
        if value is not None and not any(type(value) is type(other) and value == other for other in accepted[name]):
            expected = " or ".join(map(repr, accepted[name] or (None,)))
            raise RequestError(f"{name}: expected {expected}, found {shown(value)}", hint=hint)
