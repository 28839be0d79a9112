# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from dflash_trt.deploy.batch_schedule import vllm_schedule
from dflash_trt.deploy.catalog import needs_thinking_off
from dflash_trt.deploy.choices import STREAM_INTERVALS, chosen, circumstances
from dflash_trt.deploy.deployment_file import Method, check_runtime
from dflash_trt.deploy.draft_methods import draft_arguments, selection
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError

CACHE_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3"}
"""SGLang's names."""
THINKING_OFF = {"enable_thinking": False}


def server_arguments(
    deployment: ResolvedDeployment, runtime: Runtime, method: Method, host: str, port: int
) -> dict[str, Any]:
    """Arguments of the runtime; methods differ in what drafts need.

    Raises ConfigError for a deployment that the runtime cannot serve.
    """
    check_runtime(deployment.file, deployment.name, runtime)
    is_vllm = runtime == "vllm"
    model = {"model_tag" if is_vllm else "model_path": deployment.target}
    arguments = model | {"host": host, "port": port} | (_vllm if is_vllm else _sglang)(deployment, method)
    if deployment.file.trust_remote_code:
        arguments["trust_remote_code"] = True
    parsers = target_parsers(deployment.target)
    if runtime in parsers.reasoning:
        arguments["reasoning_parser"] = parsers.reasoning[runtime]
    if runtime in parsers.tool:
        arguments |= {"enable_auto_tool_choice": True} if is_vllm else {}
        arguments["tool_call_parser"] = parsers.tool[runtime]
    if needs_thinking_off(deployment.checkpoint):
        arguments["default_chat_template_kwargs"] = THINKING_OFF
    if method == "none":
        return arguments
    if method == "dflash":
        return arguments | _dflash(deployment, runtime)
    return arguments | selection(method, runtime, *deployment.other_draft(method))


def _vllm(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    return {
        "tensor_parallel_size": deployment.tensor_parallel,
        "enable_expert_parallel": deployment.expert_parallel > 1,
        "max_model_len": deployment.max_seq_len,
        "max_num_seqs": deployment.max_batch_size,
        "max_num_batched_tokens": deployment.max_num_tokens,
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "enable_chunked_prefill": True,
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
        **chosen("vllm", circumstances(deployment, method)),
    }


def _sglang(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    return {
        "tp_size": deployment.tensor_parallel,
        "ep_size": deployment.expert_parallel,
        "context_length": deployment.max_seq_len,
        "max_running_requests": deployment.max_batch_size,
        "chunked_prefill_size": deployment.max_num_tokens,
        "kv_cache_dtype": CACHE_DTYPES[deployment.kv_cache_dtype],
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
        **chosen("sglang", circumstances(deployment, method)),
    }


def _dflash(deployment: ResolvedDeployment, runtime: Runtime) -> dict[str, Any]:
    if deployment.draft_schedule and runtime == "sglang":
        raise ConfigError(
            f"{deployment.name}: expected one draft length, which is all that SGLang takes for DFlash, found"
            " draft_schedule",
            hint="remove draft_schedule, or tune with --runtime sglang",
        )
    sizes, K, gpu = deployment.draft_sizes, deployment.num_draft_tokens, deployment.gpus.gpu
    draft = deployment.checkpoint if deployment.mode == "engine" else deployment.draft
    arguments = draft_arguments(sizes, runtime, draft, K, deployment.name, gpu=gpu)
    if deployment.draft_schedule:
        ranges = vllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    return arguments
