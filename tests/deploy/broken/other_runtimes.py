# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's."""

from __future__ import annotations

from dflash_trt.deploy.finding import UNCHECKED, WARNING
from tests.deploy.broken.case import REMOVED, SPEC, Case

CASES = {
    "vllm: sliding and full layers": Case(
        runtime="vllm", rule="hybrid-cache", key="disable_hybrid_kv_cache_manager", severity=WARNING,
        change={"disable_hybrid_kv_cache_manager": False},
        words="vLLM 0.32.0 and 0.33.0 ended on a CPU with 'All drafting layers should belong to the same kv cache",
    ),
    "vllm: more tokens than positions": Case(
        runtime="vllm", rule="context-length", key="max_model_len", change={"max_model_len": 131073},
        words="set it to 131072", severity=WARNING,
    ),
    "sglang: more tokens than positions": Case(
        runtime="sglang", rule="context-length", key="context_length", change={"context_length": 131073},
        words="set it to 131072", severity=WARNING,
    ),
    "vllm: unknown key": Case(
        runtime="vllm", rule="unknown-key", key="max_num_seq", change={"max_num_seq": 3}, words="write max_num_seqs"
    ),
    "vllm: unknown speculative key": Case(
        runtime="vllm", rule="unknown-key", key=f"{SPEC}.num_speculative_token",
        change={f"{SPEC}.num_speculative_token": 3}, words="write num_speculative_tokens",
    ),
    "vllm: draft longer than the block": Case(
        runtime="vllm", rule="draft-length", key=f"{SPEC}.num_speculative_tokens",
        change={f"{SPEC}.num_speculative_tokens": 10}, words="expected at most 9",
    ),
    "vllm: token budget": Case(
        runtime="vllm", rule="token-budget", key="max_num_batched_tokens", change={"max_num_batched_tokens": 512},
        words="max_num_seqs * (1 + K) = 64 * 10 = 640, found 512",
    ),
    "vllm: no draft": Case(
        runtime="vllm", rule="missing-key", key=f"{SPEC}.model", change={f"{SPEC}.model": REMOVED}, words="dflash"
    ),
    "vllm: a draft on some ranks": Case(
        runtime="vllm", rule="parallelism", key=f"{SPEC}.draft_tensor_parallel_size",
        change={f"{SPEC}.draft_tensor_parallel_size": 2}, words="1 or tensor_parallel_size 8, found 2",
    ),
    "vllm: a key that is only refused": Case(
        runtime="vllm", rule="renamed-key", key=f"{SPEC}.tensor_parallel_size",
        change={f"{SPEC}.tensor_parallel_size": 8}, words="write draft_tensor_parallel_size",
    ),
    "vllm: more ranks than GPUs": Case(
        runtime="vllm", rule="parallelism", key="tensor_parallel_size", change={"data_parallel_size": 2},
        words="found 16 ranks; set it to 4",
    ),
    "vllm: memory": Case(
        runtime="vllm", rule="memory", key="max_num_seqs", change={"max_model_len": 131072 * 64}, gpus="h100x8",
        words="lower to max_model_len",
    ),
    "sglang: two windows": Case(
        runtime="sglang", rule="verify-window", key="speculative_dflash_block_size",
        change={"speculative_dflash_block_size": 8}, words="expected 10, as speculative_num_draft_tokens, found 8",
    ),
    "sglang: window longer than the block": Case(
        runtime="sglang", rule="draft-length", key="speculative_num_draft_tokens",
        change={"speculative_num_draft_tokens": 11}, words="expected at most 10 (block_size 10",
    ),
    "sglang: a window narrower than the block": Case(
        runtime="sglang", rule="verify-window", key="speculative_dflash_block_size", severity=UNCHECKED,
        change={"speculative_num_draft_tokens": 4}, words="cut the draft's own block to 4 of 10",
    ),
    "sglang: no draft": Case(
        runtime="sglang", rule="missing-key", key="speculative_draft_model_path",
        change={"speculative_draft_model_path": REMOVED}, words="a value for DFLASH",
    ),
    "sglang: pipeline": Case(
        runtime="sglang", rule="parallelism", key="pp_size", change={"pp_size": 2}, words="expected 1 with DFLASH"
    ),
    "sglang: head under data parallelism": Case(
        runtime="sglang", rule="dp-attention", key="enable_dp_lm_head", change={"attn_dp_size": 2}, words="true with"
    ),
    "sglang: window smaller than the block": Case(
        runtime="sglang", rule="draft-window", key="speculative_draft_window_size",
        change={"speculative_draft_window_size": 4}, words="at least the verify window 10",
    ),
    "sglang: sinks without a window": Case(
        runtime="sglang", rule="draft-window", key="speculative_draft_sink_size",
        change={"speculative_draft_sink_size": 4}, words="expected speculative_draft_window_size",
    ),
    "sglang: requests left to it": Case(
        runtime="sglang", rule="running-requests", key="max_running_requests",
        change={"max_running_requests": REMOVED}, words="SGLang takes 48", severity=WARNING,
    ),
}  # fmt: skip
