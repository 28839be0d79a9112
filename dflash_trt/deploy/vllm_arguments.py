# SPDX-License-Identifier: Apache-2.0
"""A deployment as arguments of `vllm serve`."""

from __future__ import annotations

from typing import Any

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.draft_schedule import vllm_schedule
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.trtllm_arguments import STREAM_INTERVAL


def vllm_arguments(deployment: ResolvedDeployment, method: Method, host: str, port: int) -> dict[str, Any]:
    """Arguments by name; methods differ only in speculative_config."""
    arguments: dict[str, Any] = {
        "model_tag": deployment.target,
        "host": host,
        "port": port,
        "tensor_parallel_size": deployment.tensor_parallel,
        "enable_expert_parallel": deployment.expert_parallel > 1,
        "max_model_len": deployment.max_seq_len,
        "max_num_seqs": deployment.max_batch_size,
        "max_num_batched_tokens": deployment.max_num_tokens,
        "max_cudagraph_capture_size": deployment.max_batch_size * (1 + deployment.num_draft_tokens),
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "enable_prefix_caching": deployment.asks_for_prefix_reuse,
        "enable_chunked_prefill": True,
        "stream_interval": STREAM_INTERVAL,
    }
    cache = None if deployment.target_sizes is None else deployment.target_sizes.cache
    if cache and cache.num_sliding_layers and cache.num_full_layers:  # else an assertion ends it: see rules/vllm_rules
        arguments["disable_hybrid_kv_cache_manager"] = True
    if deployment.trust_remote_code:
        arguments["trust_remote_code"] = True
    parsers = target_parsers(deployment.target)
    if "vllm" in parsers.reasoning:
        arguments["reasoning_parser"] = parsers.reasoning["vllm"]
    if "vllm" in parsers.tool:
        arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": parsers.tool["vllm"]}
    if method == "dflash":
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": deployment.checkpoint if deployment.mode == "engine" else deployment.draft,
            "num_speculative_tokens": deployment.num_draft_tokens,
        }
        if deployment.draft_schedule:
            ranges = vllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
            arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    elif method == "eagle3":
        eagle3 = deployment.eagle3_drafter()
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": eagle3.model,
            "num_speculative_tokens": eagle3.num_draft_tokens,
        }
    return arguments
