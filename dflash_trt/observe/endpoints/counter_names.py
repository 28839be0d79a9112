# SPDX-License-Identifier: Apache-2.0
"""Names of the figures that each runtime publishes about its traffic.

vLLM 0.33 (and ours): vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py; 0.10's names come second. SGLang
0.5.23: counters of finished requests, sglang/srt/observability/metrics_collector.py. TensorRT-LLM 050f80de: counters of
finished requests (return_perf_metrics), tensorrt_llm/metrics/collector.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.observe.endpoints.identify import ServerKind

MODEL_LABEL = "model_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterNames:
    """Counters, gauges and histograms; of several names, those that are published. Empty: it does not publish that."""

    path: str = "/metrics"
    output_tokens: str
    passes: str
    """Passes that verified a draft, for each request in them."""
    drafts_by_position: bool = False
    """Whether `passes` counts drafted tokens by position instead: position 0 is drafted once in each pass."""
    proposed: str = ""
    accepted: str = ""
    """Empty where it follows: from `positions`, or as the tokens beyond one for each pass and prefill."""
    positions: str = ""
    """Accepted drafts by `position_label`."""
    position_label: str = "position"
    requests: str = ""
    how: str
    """The counters of drafts, and how acceptance follows from them, in words."""
    sampled_tau: str = ""
    """Gauge of the acceptance length over the last log interval, for a release whose counters do not grow."""
    prefix_queries: tuple[str, ...] = ()
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: tuple[str, ...] = ()
    hit_rate: str = ""
    """A gauge of hits / queries, where there are no counters."""
    preemptions: tuple[str, ...] = ()
    cache_use: tuple[str, ...]
    """Gauges of the share of the KV cache in use."""
    running: str
    """Gauge of the requests that are being answered."""
    waiting: str
    """Gauge of requests in the queue."""
    tpot: str
    """Histogram of the time per output token (TPOT)."""

    @property
    def drafts(self) -> tuple[str, ...]:
        """Counters that acceptance is read from."""
        found = (self.output_tokens, self.passes, self.proposed, self.accepted, self.positions, self.requests)
        return tuple(filter(None, found))

    @property
    def counters(self) -> tuple[str, ...]:
        histogram = tuple(f"{self.tpot}_{part}" for part in ("sum", "count", "bucket"))
        return (*self.drafts, *self.prefix_queries, *self.prefix_hits, *self.preemptions, *histogram)

    @property
    def gauges(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.cache_use, self.waiting, self.hit_rate) if name)


VLLM = CounterNames(
    output_tokens="vllm:generation_tokens_total",
    passes="vllm:spec_decode_num_drafts_total",
    proposed="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    positions="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    how="vllm:spec_decode_num_drafts, _draft_tokens, _accepted_tokens and _accepted_tokens_per_pos",
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    preemptions=("vllm:num_preemptions_total",),
    cache_use=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    tpot="vllm:request_time_per_output_token_seconds",
)
COUNTER_NAMES: dict[ServerKind, CounterNames] = {
    "dflash-trt": VLLM,
    "vllm": VLLM,
    "sglang": CounterNames(
        output_tokens="sglang:generation_tokens_total",
        passes="sglang:spec_verify_calls_total",
        requests="sglang:num_requests_total",
        how="sglang:spec_verify_calls_total; accepted = generation_tokens - num_requests - spec_verify_calls: drafts"
        " that requests kept, without those behind their end",
        sampled_tau="sglang:spec_accept_length",
        prefix_queries=("sglang:prompt_tokens_total",),
        prefix_hits=("sglang:cached_tokens_total",),
        preemptions=("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        cache_use=("sglang:token_usage",),
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        tpot="sglang:inter_token_latency_seconds",
    ),
    "tensorrt-llm": CounterNames(
        path="/prometheus/metrics",
        output_tokens="trtllm_generation_tokens_total",
        passes="trtllm_spec_decode_drafted_tokens_total",
        drafts_by_position=True,
        positions="trtllm_spec_decode_accepted_tokens_total",
        position_label="token_position",
        how="trtllm_spec_decode_drafted_tokens and _accepted_tokens by position; drafting passes = drafted at position"
        " 0",
        hit_rate="trtllm_kv_cache_hit_rate",
        cache_use=("trtllm_kv_cache_utilization",),
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        tpot="trtllm_time_per_output_token_seconds",
    ),
}
