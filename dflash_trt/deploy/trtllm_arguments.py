# SPDX-License-Identifier: Apache-2.0
"""Arguments of tensorrt_llm.LLM, and trtllm-serve's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.deploy.batch_schedule import trtllm_schedule
from dflash_trt.deploy.choices import STREAM_INTERVALS, chosen, circumstances
from dflash_trt.deploy.deployment_file import Method, check_runtime
from dflash_trt.deploy.draft_methods import draft_arguments, selection
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.runtime_arguments import merged
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.files.command import argument

ENGINE_MODE = ("python", "-m", "dflash_trt.trtllm")
"""Starts a command in whose ranks engine mode's drafter is registered (dflash_trt/trtllm)."""
POSTPROCESS_WORKERS = 4
ATTENTION_DP = {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1}
"""Settings of NVIDIA's gpt-oss-120b-throughput.yaml (examples/configs/curated @ 25f307ee)."""


def trtllm_arguments(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    """The arguments of `tensorrt_llm.LLM`, the model's name aside; methods differ in what drafts need.

    Raises ConfigError for a deployment that TensorRT-LLM cannot serve.
    """
    check_runtime(deployment.file, deployment.name, "trtllm")
    arguments: dict[str, Any] = {
        "tensor_parallel_size": deployment.tensor_parallel,
        "moe_expert_parallel_size": deployment.expert_parallel,
        "enable_attention_dp": deployment.enable_attention_dp,
        "max_batch_size": deployment.max_batch_size,
        "max_num_tokens": deployment.max_num_tokens,
        "max_seq_len": deployment.max_seq_len,
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
        "num_postprocess_workers": POSTPROCESS_WORKERS,
        "cuda_graph_config": {
            "enable_padding": not _pads_into_the_pool(deployment, method),
        },
        "kv_cache_config": {
            "dtype": deployment.kv_cache_dtype,
            "free_gpu_memory_fraction": deployment.kv_cache_fraction,
            "enable_block_reuse": deployment.reuses_prefixes("trtllm", method),
        },
    }
    of_drafts: dict[str, Any] = {}
    for key, value in chosen("trtllm", circumstances(deployment, method)).items():
        outer, _, inner = key.partition(".")
        settings = of_drafts if outer == "speculative_config" else arguments[outer] if inner else arguments
        settings[inner or outer] = value
    if deployment.prefix_reuse and deployment.draft_attention == "TRTLLM":
        arguments["kv_cache_config"]["use_kv_cache_manager_v2"] = True  # V1 pairs no pools
    if deployment.enable_attention_dp:
        arguments["attention_dp_config"] = ATTENTION_DP
    if deployment.file.trust_remote_code:
        arguments["trust_remote_code"] = True
    if deployment.moe_backend is not None:
        arguments["moe_config"] = {"backend": deployment.moe_backend}
    if (reasoning := target_parsers(deployment.target).reasoning.get("trtllm")) is not None:
        arguments["reasoning_parser"] = reasoning
    if method == "dflash":
        sizes, K, name = deployment.draft_sizes, deployment.num_draft_tokens, deployment.name
        arguments |= draft_arguments(
            sizes, "trtllm", trtllm_draft(deployment), K, name, gpu=None, attention=deployment.draft_attention
        )
        if not sizes.spec.is_dspark:
            arguments["speculative_config"] |= of_drafts | _sampling(deployment)
        if deployment.draft_schedule:
            schedule = trtllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
            arguments["speculative_config"]["draft_len_schedule"] = schedule
    elif method != "none":
        draft, K = deployment.other_draft(method)
        arguments |= selection(method, "trtllm", None if draft is None else place(draft), K)
        arguments["speculative_config"] |= of_drafts | (_sampling(deployment) if method != "ngram" else {})
    return merged(arguments, deployment.more_arguments("trtllm", method))


def trtllm_command(deployment: ResolvedDeployment, method: Method, host: str, port: int) -> list[str]:
    """trtllm-serve with the model, the address and, because its file has no key for it, the tool parser.

    The name of the file is the last word, and missing.
    """
    target, host = argument(deployment.target, "target"), argument(host, "--host")
    command = ["trtllm-serve", target, "--host", host, "--port", str(port)]
    if (tool := target_parsers(deployment.target).tool.get("trtllm")) is not None:
        command += ["--tool_parser", tool]
    command.append("--config")
    return [*ENGINE_MODE, *command] if is_engine_mode(deployment, method) else command


def is_engine_mode(deployment: ResolvedDeployment, method: Method) -> bool:
    """Whether our drafter replaces TensorRT-LLM's."""
    return deployment.mode == "engine" and method == "dflash"


def converted_draft(draft: DraftSizes) -> str | None:
    """Directory of a draft's copy that has a dense Qwen3 backbone, where the draft itself has none.

    TensorRT-LLM builds the layers by model_type, and those of gpt_oss have no fused self_attn.qkv_proj.
    """
    is_dense = draft.spec.model_type != "gpt_oss" or draft.quantized
    return None if is_dense else f"{Path(draft.name).name}-bf16"


def place(draft: str) -> str:
    """Absolute path of a directory, because the file may be read elsewhere; a repository id unchanged."""
    return str(Path(draft).absolute()) if Path(draft).is_dir() else draft


def _pads_into_the_pool(deployment: ResolvedDeployment, method: Method) -> bool:
    """Whether padding rows of a batch would write into other requests' pages.

    In the workers of 414ba69f and 8d62b3e5 their slot grows at each replay of a CUDA graph, and past its pages they
    write to page 0: its request drafts worse, and so does each that reuses it. Native files pad all the same, because
    batches between two graphs are slow without.
    """
    return method == "dflash" and deployment.mode == "engine" and deployment.draft_attention == "TRTLLM"


def trtllm_draft(deployment: ResolvedDeployment) -> str:
    """Draft that TensorRT-LLM loads."""
    is_whole = deployment.mode == "native" and deployment.draft == deployment.checkpoint
    return (converted_draft(deployment.draft_sizes) if is_whole else None) or place(deployment.draft)


def _sampling(deployment: ResolvedDeployment) -> dict[str, Any]:
    """Settings of the one-model sampler."""
    return {"use_rejection_sampling": True} if deployment.file.use_rejection_sampling else {}
