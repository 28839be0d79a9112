# SPDX-License-Identifier: Apache-2.0
"""Pages of counters as runtimes publish them while users ask them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

HEALTHY = (0.85, 0.7, 0.58, 0.47, 0.38, 0.3, 0.24)
"""Shares of passes that accept each of seven drafts: tau 4.52."""
NAMES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm"}


@dataclass(frozen=True)
class Engine:
    """One engine's totals after some passes."""

    passes: int = 4000
    rates: Sequence[float] = HEALTHY
    prefix_queries: int = 100_000
    prefix_hits: int = 40_000
    preemptions: int = 0
    waiting: int = 0
    milliseconds: float = 8.0
    model: str = "m"

    def times(self, count: int) -> Engine:
        grown = {
            name: getattr(self, name) * count for name in ("passes", "prefix_queries", "prefix_hits", "preemptions")
        }
        return replace(self, **grown)

    @property
    def accepted(self) -> list[int]:
        return [round(self.passes * rate) for rate in self.rates]


def page(kind: str, *engines: Engine, labels: Sequence[str] = ()) -> str:
    """The page of a server with these engines; `labels`: more of each engine's."""
    of_kind = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _trtllm}[kind]
    lines: list[str] = []
    for number, engine in enumerate(engines):
        rank = [f'engine="{number}"'] if kind == "vllm" else []
        lines += of_kind(engine, ",".join([f'model_name="{engine.model}"', *rank, *labels[number : number + 1]]))
    return "\n".join(lines) + "\n"


def _histogram(name: str, engine: Engine, labels: str) -> list[str]:
    """Nine of ten requests in the first bucket."""
    count, seconds = engine.passes // 40, engine.milliseconds / 1e3
    buckets = ((f"{seconds * 1.1:.6f}", count * 9 // 10), (f"{seconds * 2:.6f}", count), ("+Inf", count))
    lines = [f'{name}_bucket{{{labels},le="{bound}"}} {value}' for bound, value in buckets]
    return [*lines, f"{name}_sum{{{labels}}} {count * seconds}", f"{name}_count{{{labels}}} {count}"]


def _vllm(engine: Engine, labels: str) -> list[str]:
    spec, drafted = "vllm:spec_decode_num", engine.passes * len(engine.rates)
    positions = [
        f'{spec}_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {count}'
        for at, count in enumerate(engine.accepted)
    ]
    drafts = [
        f"{spec}_drafts_total{{{labels}}} {engine.passes}",
        f"{spec}_draft_tokens_total{{{labels}}} {drafted}",
        f"{spec}_accepted_tokens_total{{{labels}}} {sum(engine.accepted)}",
        *positions,
    ]
    return [
        *(drafts if engine.rates else []),
        f"vllm:generation_tokens_total{{{labels}}} {engine.passes + sum(engine.accepted)}",
        f"vllm:prefix_cache_queries_total{{{labels}}} {engine.prefix_queries}",
        f"vllm:prefix_cache_hits_total{{{labels}}} {engine.prefix_hits}",
        f"vllm:num_preemptions_total{{{labels}}} {engine.preemptions}",
        f"vllm:num_requests_waiting{{{labels}}} {engine.waiting}",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.4",
        *_histogram("vllm:request_time_per_output_token_seconds", engine, labels),
    ]


def _sglang(engine: Engine, labels: str) -> list[str]:
    requests = engine.passes // 40
    return [
        f"sglang:spec_verify_calls_total{{{labels}}} {engine.passes}",
        f"sglang:num_requests_total{{{labels}}} {requests}",
        f"sglang:generation_tokens_total{{{labels}}} {engine.passes + sum(engine.accepted) + requests}",
        f"sglang:prompt_tokens_total{{{labels}}} {engine.prefix_queries}",
        f"sglang:cached_tokens_total{{{labels}}} {engine.prefix_hits}",
        f"sglang:num_queue_reqs{{{labels}}} {engine.waiting}",
        f"sglang:token_usage{{{labels}}} 0.4",
        *_histogram("sglang:inter_token_latency_seconds", engine, labels),
    ]


def _trtllm(engine: Engine, labels: str) -> list[str]:
    spec = "trtllm_spec_decode"
    positions = [
        f'{spec}_{what}_tokens_total{{{labels},token_position="{at}"}} {count}'
        for at, accepted in enumerate(engine.accepted)
        for what, count in (("drafted", engine.passes), ("accepted", accepted))
    ]
    return [
        *positions,
        f"trtllm_generation_tokens_total{{{labels}}} {engine.passes + sum(engine.accepted)}",
        f"trtllm_kv_cache_hit_rate{{{labels}}} {engine.prefix_hits / engine.prefix_queries}",
        f"trtllm_kv_cache_utilization{{{labels}}} 0.4",
        f"trtllm_num_requests_waiting{{{labels}}} {engine.waiting}",
        *_histogram("trtllm_time_per_output_token_seconds", engine, labels),
    ]
