# SPDX-License-Identifier: Apache-2.0
"""Metrics of each runtime as PromQL.

In an expression, SELECTOR and WINDOW stand for label matchers and a range, and LABELS for what series are summed by:
the model, or one engine of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

MODEL = "model_name"


def rate(metric: str, by: str = "LABELS", where: str = "") -> str:
    """Growth of a counter per second."""
    return f"sum by ({by}) (rate({metric}{{SELECTOR{where}}}[WINDOW]))"


def mean(histogram: str) -> str:
    """Mean of a histogram's observations."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def quantile(share: float, *histograms: str) -> str:
    """A quantile of the first of `histograms` that there is: a later name is an older release's."""
    return " or ".join(f"histogram_quantile({share}, {rate(f'{name}_bucket', 'LABELS, le')})" for name in histograms)


def gauge(metric: str) -> str:
    """Sum of a gauge over all engines of a model."""
    return f"sum by (LABELS) ({metric}{{SELECTOR}})"


def average(*metrics: str) -> str:
    """Mean of the first of `metrics` that there is over all engines of a model."""
    return " or ".join(f"avg by (LABELS) ({name}{{SELECTOR}})" for name in metrics)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One runtime's expressions. Empty: it does not publish that."""

    title: str
    source: str
    """Where the names were read."""
    engine: str = "model_name, instance"
    """Labels of one engine: a server, or what it tells apart."""
    drafts: str
    """Verify passes with a draft, per second."""
    tau: str
    """Accepted drafts and the bonus token, per verify pass."""
    proposed: str = ""
    """Draft tokens per second, where acceptance by position is a share of all passes."""
    positions: str = ""
    """Share of verify passes that accepted the draft at a position, by `position_label`."""
    position_label: str = "position"
    output_tokens: str
    running: str
    waiting: str
    queue: str
    """The histogram of seconds in the queue; below likewise."""
    ttft: str
    itl: tuple[str, ...] = ()
    tpot: str
    """Mean seconds per output token."""
    step_seconds: str = ""
    """Mean seconds of a verify pass."""
    finished: str = ""
    """Finished requests per second, by finished_reason."""
    gauges: dict[str, str] = field(default_factory=dict)
    """Legend -> share from 0 to 1, of caches."""


V = "vllm:spec_decode_num"
# vLLM 0.32.0, vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
OURS = Runtime(
    title="dflash-trt serve",
    source="dflash_trt/runtime/server/telemetry/prometheus.py",
    engine="model_name, instance, engine",
    drafts=rate(f"{V}_drafts_total"),
    proposed=rate(f"{V}_draft_tokens_total"),
    tau=f"1 + {rate(f'{V}_accepted_tokens_total')} / {rate(f'{V}_drafts_total')}",
    positions=f"{rate(f'{V}_accepted_tokens_per_pos_total', 'LABELS, position')}"
    f" / on (LABELS) group_left () {rate(f'{V}_drafts_total')}",
    output_tokens=rate("vllm:generation_tokens_total"),
    running=gauge("vllm:num_requests_running"),
    waiting=gauge("vllm:num_requests_waiting"),
    queue="vllm:request_queue_time_seconds",
    ttft="vllm:time_to_first_token_seconds",
    itl=("vllm:inter_token_latency_seconds",),
    tpot=mean("vllm:request_time_per_output_token_seconds"),
    step_seconds=mean("vllm:inter_token_latency_seconds"),
    finished=rate("vllm:request_success_total", "finished_reason"),
)
# 0.10 has vllm:time_per_output_token_seconds, which is the time between steps, and the prefix gpu_ below.
VLLM = replace(
    OURS,
    title="vLLM",
    source="vLLM 0.32.0, and the older names of 0.10 where they differ",
    itl=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    step_seconds=f"{mean('vllm:inter_token_latency_seconds')} or {mean('vllm:time_per_output_token_seconds')}",
    gauges={
        "prefix cache hits": f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}"
        f" or {rate('vllm:gpu_prefix_cache_hits_total')} / {rate('vllm:gpu_prefix_cache_queries_total')}",
        "KV cache in use": average("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
)
# SGLang 0.5.23, python/sglang/srt/observability/metrics_collector.py; `--enable-metrics`. No figure by position.
# All three counters of tau grow when a request ends; its first token is its prefill's.
SGLANG = Runtime(
    title="SGLang",
    source="SGLang 0.5.23, started with --enable-metrics",
    drafts=rate("sglang:spec_verify_calls_total"),
    tau=f"({rate('sglang:generation_tokens_total')} - {rate('sglang:num_requests_total')})"
    f" / {rate('sglang:spec_verify_calls_total')}",
    output_tokens=rate("sglang:generation_tokens_total"),
    running=gauge("sglang:num_running_reqs"),
    waiting=gauge("sglang:num_queue_reqs"),
    queue="sglang:queue_time_seconds",
    ttft="sglang:time_to_first_token_seconds",
    itl=("sglang:inter_token_latency_seconds",),
    tpot=mean("sglang:inter_token_latency_seconds"),  # it counts each token of a step
    gauges={
        "prefix cache hits": average("sglang:cache_hit_rate"),
        "KV cache in use": average("sglang:token_usage"),
    },
)
T = "trtllm_spec_decode"
_TRTLLM_DRAFTS = rate(f"{T}_drafted_tokens_total", where=',token_position="0"')
# TensorRT-LLM, tensorrt_llm/metrics/collector.py at 050f80de (after 1.4.0rc1); `return_perf_metrics: true`.
TENSORRT_LLM = Runtime(
    title="TensorRT-LLM",
    source="TensorRT-LLM main 050f80de (mid 2026), with return_perf_metrics: true",
    drafts=_TRTLLM_DRAFTS,
    tau=f"1 + {rate(f'{T}_accepted_tokens_total')} / {_TRTLLM_DRAFTS}",
    positions=f"{rate(f'{T}_accepted_tokens_total', 'LABELS, token_position')}"
    f" / {rate(f'{T}_drafted_tokens_total', 'LABELS, token_position')}",
    position_label="token_position",
    output_tokens=rate("trtllm_generation_tokens_total"),
    running=gauge("trtllm_num_requests_running"),
    waiting=gauge("trtllm_num_requests_waiting"),
    queue="trtllm_request_queue_time_seconds",
    ttft="trtllm_time_to_first_token_seconds",
    tpot=mean("trtllm_time_per_output_token_seconds"),
    finished=rate("trtllm_request_success_total", "finished_reason"),
    gauges={
        "prefix cache hits": average("trtllm_kv_cache_hit_rate"),
        "KV cache in use": average("trtllm_kv_cache_utilization"),
    },
)
RUNTIMES = {"dflash_trt": OURS, "vllm": VLLM, "sglang": SGLANG, "tensorrt_llm": TENSORRT_LLM}
