# SPDX-License-Identifier: Apache-2.0
"""Settings that are written for every deployment of a kind, each with its reason: one table for writer and checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.hybrid_caches import vllm_cache_layout
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that choices depend on; None if unknown."""

    method: str | None = "dflash"
    """dflash, eagle3, mtp, ngram or another's own name; None for plain decoding."""
    reuses_prefixes: bool | None = None
    """Whether the deployment asks for a prefix cache, or for none."""
    cache_layout: str | None = None
    """Cache layout that spares vLLM a group for each layer."""
    max_batch_size: int | None = None
    decode_tokens: int | None = None
    """Tokens of a step in which every request verifies all drafts."""
    graph_tokens: int = 512
    """Tokens of the largest CUDA graph that vLLM captures of its own accord."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    rule: str
    key: str
    wanted: Callable[[Circumstances], Any]
    """Value for some circumstances; None to leave the runtime's default."""
    why: str
    """Effect of another value, and the source."""
    is_environment: bool = False
    """Whether it is a variable of the environment."""
    is_least: bool = False
    """Whether larger values are as good; an unset one is then left to the runtime."""
    is_default: Callable[[Circumstances], bool] = lambda _: False
    """Whether the runtime's default is it, or as good; it is then not written."""
    unset: str = ""
    """Behaviour of the runtime if its default is none."""


def _reuse(circumstances: Circumstances, *, default: bool) -> bool | None:
    """Reuse of prefixes as the deployment asks for it; with DFlash `default`, else the runtime's own choice."""
    asked = circumstances.reuses_prefixes
    return default if asked is None and circumstances.method == "dflash" else asked


STREAM_INTERVALS = {"latency": 1, "throughput": 20}
"""Steps between two chunks of an answer; NVIDIA's gpt-oss-120b files have 20 for both, which a user sees as bursts."""

CHOICES: dict[Runtime, tuple[Choice, ...]] = {
    "trtllm": (
        Choice(rule="metrics", key="return_perf_metrics", wanted=lambda _: True,
               why="/prometheus/metrics is a 404: neither doctor nor an alert sees acceptance"
               " (tensorrt_llm/metrics/collector.py)"),
        Choice(rule="chunked-prefill", key="enable_chunked_prefill", wanted=lambda _: True,
               why="prompts longer than max_num_tokens are refused"),
        Choice(rule="cuda-graphs", key="cuda_graph_config.max_batch_size", wanted=lambda c: c.max_batch_size,
               is_least=True, why="larger batches run outside CUDA graphs"),
        Choice(rule="penalties", key="speculative_config.enable_penalty",
               wanted=lambda c: True if c.method in ("dflash", "eagle3", "mtp") else None,
               why="requests with penalties are refused (spec_sampler_base.py)"),
    ),
    "vllm": (
        Choice(rule="prefix-reuse", key="enable_prefix_caching",
               wanted=lambda c: _reuse(c, default=False),
               unset="on by default",
               why="tokens that a hit spares the target bring the drafter no hidden states, and acceptance falls"
               " (vllm#47930, vllm#51250)"),
        Choice(rule="hybrid-cache", key="disable_hybrid_kv_cache_manager",
               wanted=lambda c: False if c.method == "dflash" else None, is_default=lambda _: True,
               why="gpt-oss-120b then keeps 1.69 times the KV bytes of a token (20b 1.33), and Gemma 4 does not start"
               " ('same window size'): counted with vLLM 0.33.0's own v1/core/kv_cache_planning.py. It spares the V1"
               " runner an assertion, and CUDA decodes DFlash with V2 (config/vllm.py); a CPU without Triton has V1"),
        Choice(rule="cache-groups", key="VLLM_KV_CACHE_LAYOUT", is_environment=True,
               wanted=lambda c: c.cache_layout if c.method == "dflash" else None, unset="none",
               why="each layer is then a KV cache group, whose metadata every step builds: 46 of Qwen3.6-35B-A3B and"
               " draft, 5 with this layout (v1/core/kv_cache_planning.py of vLLM 0.33.0). Fewer groups brought 102 % on"
               " an H200 (vllm#51742, open)"),
        Choice(rule="metrics", key="disable_log_stats", wanted=lambda _: False, is_default=lambda _: True,
               why="/metrics has no counts: neither doctor nor an alert sees acceptance"),
        Choice(rule="cuda-graphs", key="max_cudagraph_capture_size", wanted=lambda c: c.decode_tokens, is_least=True,
               is_default=lambda c: (c.decode_tokens or 0) <= c.graph_tokens,
               why="full batches, of 1 + K tokens a request, run outside CUDA graphs"),
    ),
    "sglang": (
        Choice(rule="metrics", key="enable_metrics", wanted=lambda _: True,
               why="/metrics is a 404: neither doctor nor an alert sees acceptance"),
        Choice(rule="prefix-reuse", key="disable_radix_cache",
               wanted=lambda c: None if (reuse := _reuse(c, default=True)) is None else not reuse,
               why="the drafter's rows lie in the slots of the target's, so that a hit has both (dflash_worker_v2.py of"
               " SGLang 0.5.23, alloc_memory_pool and the prefill); without it each prompt is computed whole"),
        Choice(rule="cuda-graphs", key="cuda_graph_max_bs_decode", wanted=lambda c: c.max_batch_size, is_least=True,
               why="larger batches run outside CUDA graphs"),
    ),
}  # fmt: skip


def chosen(runtime: Runtime, circumstances: Circumstances, *, is_environment: bool = False) -> dict[str, Any]:
    """Every argument that is written, by dotted key, or every variable that is set."""
    written = (c for c in CHOICES[runtime] if not c.is_default(circumstances) and c.is_environment == is_environment)
    values = {choice.key: choice.wanted(circumstances) for choice in written}
    return {key: value for key, value in values.items() if value is not None}


def circumstances(deployment: ResolvedDeployment, method: Method) -> Circumstances:
    """Facts of a deployment that choices depend on; ConfigError where it has no draft for the method."""
    return Circumstances(
        method=None if method == "none" else method, reuses_prefixes=deployment.asked_prefix_reuse,
        cache_layout=vllm_cache_layout(deployment.checkpoint, deployment.tensor_parallel),
        max_batch_size=deployment.max_batch_size,
        decode_tokens=deployment.max_batch_size * (1 + deployment.draft_length(method)),
        graph_tokens=graph_tokens(deployment.gpus),
    )  # fmt: skip


def graph_tokens(gpus: Gpus | None) -> int:
    """Tokens of the largest CUDA graph of vLLM 0.33.0 by default (config/vllm.py, _set_cudagraph_sizes).

    It captures every batch of 1 + K tokens a request up to there. A size that is given replaces these by steps of 16.
    """
    is_blackwell = gpus is not None and gpus.gpu.compute_capability[0] == 10
    return 1024 if is_blackwell else 512
