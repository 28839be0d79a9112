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
    lines: list[str] = []
    for number, engine in enumerate(engines):
        rank = [f'engine="{number}"'] if kind == "vllm" else []
        own = [f'model_name="{engine.model}"', *rank, *labels[number : number + 1]]
        tokens, requests = engine.passes + sum(engine.accepted), engine.passes // 40
        lines += counters(kind, engine.passes, engine.accepted, tokens, *own, requests=requests)
        lines += [_line(name, value, own) for name, value in _others(kind, engine).items()]
        lines += _histogram(TIMES[kind], engine, own)
    return "\n".join(lines) + "\n"


def counters(
    kind: str, passes: int, accepted: Sequence[int], tokens: int, *labels: str, requests: int = 0
) -> list[str]:  # fmt: skip
    """Counters of drafts and tokens of one engine, `accepted` by position; without positions, of no drafter.

    SGLang counts the first token of each request with the others.
    """
    if kind == "sglang":
        counts = {"spec_verify_calls": passes, "num_requests": requests, "generation_tokens": tokens + requests}
        return [_line(f"sglang:{name}_total", value, labels) for name, value in counts.items()]
    if kind == "tensorrt-llm":
        spec = {
            (what, at): count for at, n in enumerate(accepted) for what, count in (("drafted", passes), ("accepted", n))
        }
        return [
            *(_line(f"trtllm_spec_decode_{what}_tokens_total", count, [*labels, f'token_position="{at}"'])
              for (what, at), count in spec.items()),
            _line("trtllm_generation_tokens_total", tokens, labels),
        ]  # fmt: skip
    drafts = {"drafts": passes, "draft_tokens": passes * len(accepted), "accepted_tokens": sum(accepted)}
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return [
        *(_line(f"vllm:spec_decode_num_{name}_total", value, labels) for name, value in drafts.items() if accepted),
        *(_line(per_position, count, [*labels, f'position="{at}"']) for at, count in enumerate(accepted)),
        _line("vllm:generation_tokens_total", tokens, labels),
    ]


def _line(name: str, value: float, labels: Sequence[str]) -> str:
    return f"{name}{{{','.join(labels)}}} {value}"


TIMES = {
    "vllm": "vllm:request_time_per_output_token_seconds", "sglang": "sglang:inter_token_latency_seconds",
    "tensorrt-llm": "trtllm_time_per_output_token_seconds",
}  # fmt: skip


def _histogram(name: str, engine: Engine, labels: Sequence[str]) -> list[str]:
    """Nine of ten requests in the first bucket."""
    count, seconds = engine.passes // 40, engine.milliseconds / 1e3
    buckets = ((f"{seconds * 1.1:.6f}", count * 9 // 10), (f"{seconds * 2:.6f}", count), ("+Inf", count))
    lines = [_line(f"{name}_bucket", value, [*labels, f'le="{bound}"']) for bound, value in buckets]
    return [*lines, _line(f"{name}_sum", count * seconds, labels), _line(f"{name}_count", count, labels)]


def _others(kind: str, engine: Engine) -> dict[str, float]:
    """Caches and queue."""
    if kind == "vllm":
        return {
            "vllm:prefix_cache_queries_total": engine.prefix_queries,
            "vllm:prefix_cache_hits_total": engine.prefix_hits, "vllm:num_preemptions_total": engine.preemptions,
            "vllm:num_requests_waiting": engine.waiting, "vllm:kv_cache_usage_perc": 0.4,
        }  # fmt: skip
    if kind == "sglang":
        return {
            "sglang:prompt_tokens_total": engine.prefix_queries, "sglang:cached_tokens_total": engine.prefix_hits,
            "sglang:num_queue_reqs": engine.waiting, "sglang:token_usage": 0.4,
        }  # fmt: skip
    return {
        "trtllm_kv_cache_hit_rate": engine.prefix_hits / engine.prefix_queries, "trtllm_kv_cache_utilization": 0.4,
        "trtllm_num_requests_waiting": engine.waiting,
    }  # fmt: skip
