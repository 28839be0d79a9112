# SPDX-License-Identifier: Apache-2.0
"""A deployment as arguments of SGLang's server."""

from __future__ import annotations

from typing import Any

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.trtllm_arguments import STREAM_INTERVAL
from dflash_trt.errors import ConfigError

CACHE_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3"}


def sglang_arguments(deployment: ResolvedDeployment, method: Method, host: str, port: int) -> dict[str, Any]:
    """Arguments by name; methods differ only in speculative_*."""
    arguments: dict[str, Any] = {
        "model_path": deployment.target,
        "host": host,
        "port": port,
        "tp_size": deployment.tensor_parallel,
        "ep_size": deployment.expert_parallel,
        "context_length": deployment.max_seq_len,
        "max_running_requests": deployment.max_batch_size,
        "chunked_prefill_size": deployment.max_num_tokens,
        "cuda_graph_max_bs_decode": deployment.max_batch_size,
        "kv_cache_dtype": CACHE_DTYPES[deployment.kv_cache_dtype],
        "disable_radix_cache": not deployment.asks_for_prefix_reuse,
        "stream_interval": STREAM_INTERVAL,
    }
    if deployment.trust_remote_code:
        arguments["trust_remote_code"] = True
    parsers = target_parsers(deployment.target)
    if "sglang" in parsers.reasoning:
        arguments["reasoning_parser"] = parsers.reasoning["sglang"]
    if "sglang" in parsers.tool:
        arguments["tool_call_parser"] = parsers.tool["sglang"]
    if method == "dflash":
        if deployment.draft_schedule:
            raise ConfigError(
                f"{deployment.name}: expected one draft length, which is all that SGLang takes for DFlash, found"
                " draft_schedule",
                hint="remove draft_schedule, or tune with --runtime sglang",
            )
        arguments |= {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": deployment.checkpoint if deployment.mode == "engine" else deployment.draft,
            # SGLang counts the verify window, the last verified token included.
            "speculative_num_draft_tokens": deployment.num_draft_tokens + 1,
        }
    elif method == "eagle3":
        eagle3 = deployment.eagle3_drafter()
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": eagle3.model,
            "speculative_num_steps": eagle3.num_draft_tokens,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": eagle3.num_draft_tokens + 1,
        }
    return arguments
