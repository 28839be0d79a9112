# SPDX-License-Identifier: Apache-2.0
"""Names of the figures that each runtime publishes about its traffic.

vLLM 0.33 (and ours): vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py; 0.10's names come second. SGLang
0.5.23: sglang/srt/observability/metrics_collector.py. TensorRT-LLM 050f80de: tensorrt_llm/metrics/collector.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.observe.endpoints.counter_meters import SGLANG_STEPS, TRTLLM, VLLM
from dflash_trt.observe.endpoints.identify import ServerKind

ENGINE_LABELS = ("instance", "engine", "dp_rank")
"""Labels that tell engines apart: a scraped server, and the data-parallel ranks of vLLM and SGLang."""
MODEL_LABEL = "model_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterNames:
    """Counters, gauges and histograms; of several names, those that are published. Empty: it does not publish that."""

    path: str = "/metrics"
    output_tokens: str
    passes: str
    """Passes that verified a draft, for each request in them."""
    proposed: str = ""
    accepted: str = ""
    positions: str = ""
    """Accepted drafts by `position_label`."""
    position_label: str = "position"
    requests: str = ""
    prefix_queries: tuple[str, ...] = ()
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: tuple[str, ...] = ()
    hit_rate: str = ""
    """A gauge of hits / queries, where there are no counters."""
    preemptions: tuple[str, ...] = ()
    cache_use: tuple[str, ...]
    """Gauges of the share of the KV cache in use."""
    waiting: str
    """Gauge of requests in the queue."""
    tpot: str
    """Histogram of the time per output token (TPOT)."""

    @property
    def counters(self) -> tuple[str, ...]:
        histogram = tuple(f"{self.tpot}_{part}" for part in ("sum", "count", "bucket"))
        single = (self.output_tokens, self.passes, self.proposed, self.accepted, self.positions, self.requests)
        found = (*single, *self.prefix_queries, *self.prefix_hits, *self.preemptions, *histogram)
        return tuple(dict.fromkeys(name for name in found if name))

    @property
    def gauges(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.cache_use, self.waiting, self.hit_rate) if name)


_VLLM = CounterNames(
    output_tokens="vllm:generation_tokens_total",
    passes=f"{VLLM}_drafts_total",
    proposed=f"{VLLM}_draft_tokens_total",
    accepted=f"{VLLM}_accepted_tokens_total",
    positions=f"{VLLM}_accepted_tokens_per_pos_total",
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    preemptions=("vllm:num_preemptions_total",),
    cache_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    waiting="vllm:num_requests_waiting",
    tpot="vllm:request_time_per_output_token_seconds",
)
COUNTER_NAMES: dict[ServerKind, CounterNames] = {
    "dflash-trt": _VLLM,
    "vllm": _VLLM,
    "sglang": CounterNames(
        output_tokens="sglang:generation_tokens_total",
        passes=SGLANG_STEPS,
        requests="sglang:num_requests_total",
        prefix_queries=("sglang:prompt_tokens_total",),
        prefix_hits=("sglang:cached_tokens_total",),
        preemptions=("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        cache_use=("sglang:token_usage",),
        waiting="sglang:num_queue_reqs",
        tpot="sglang:inter_token_latency_seconds",
    ),
    "tensorrt-llm": CounterNames(
        path="/prometheus/metrics",
        output_tokens="trtllm_generation_tokens_total",
        passes=f"{TRTLLM}_drafted_tokens_total",
        positions=f"{TRTLLM}_accepted_tokens_total",
        position_label="token_position",
        hit_rate="trtllm_kv_cache_hit_rate",
        cache_use=("trtllm_kv_cache_utilization",),
        waiting="trtllm_num_requests_waiting",
        tpot="trtllm_time_per_output_token_seconds",
    ),
}
