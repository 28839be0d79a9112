# SPDX-License-Identifier: Apache-2.0
"""/metrics under vLLM's names, so that dashboards for vLLM work with this server.

Names, labels and buckets as in vLLM's vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.runtime.server.served_backend import ServedBackend

LABELS = ("model_name", "engine")
GAUGES = {
    "vllm:num_requests_running": ("running", "Number of requests in model execution batches."),
    "vllm:num_requests_waiting": ("waiting", "Number of requests waiting to be processed."),
}
COUNTERS = {
    "vllm:generation_tokens": ("output_tokens", "Number of generation tokens processed."),
    "vllm:spec_decode_num_drafts": ("acceptance.drafting_passes", "Number of spec decoding drafts."),
    "vllm:spec_decode_num_draft_tokens": ("acceptance.proposed", "Number of draft tokens."),
    "vllm:spec_decode_num_accepted_tokens": ("acceptance.accepted", "Number of accepted tokens."),
    "dflash:structured_output_forced_tokens": ("acceptance.forced", "Number of tokens that a grammar forced."),
    "vllm:prefix_cache_queries": (
        "prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
    ),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens."),
}
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
SECONDS = {
    "time_to_first_token": ("Histogram of time to first token in seconds.", TTFT),
    "inter_token_latency": ("Histogram of inter-token latency in seconds.", TOKEN),
    "request_time_per_output_token": ("Histogram of time per output token of a request, in seconds.", TOKEN),
    "e2e_request_latency": ("Histogram of e2e request latency in seconds.", REQUEST),
    "request_queue_time": ("Histogram of time spent in WAITING phase for request.", REQUEST),
    "request_inference_time": ("Histogram of time spent in RUNNING phase for request.", REQUEST),
    "request_prefill_time": ("Histogram of time spent in PREFILL phase for request.", REQUEST),
    "request_decode_time": ("Histogram of time spent in DECODE phase for request.", REQUEST),
}


class ServerMetrics(Collector):
    """The metrics of a backend; counters and gauges are read from it at each scrape."""

    def __init__(self, model: str, backend: ServedBackend) -> None:
        self.consecutive_failures = 0
        self.last_failure = ""
        self.registry = CollectorRegistry()
        self._backend = backend
        self._labels = labels = (model, "0")
        self._num_prompt_tokens = 0
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            return family.labels(*labels)

        self._seconds = {name: histogram(f"{name}_seconds", *rest) for name, rest in SECONDS.items()}
        sizes = _one_two_five(backend.max_length)
        self._prompt = histogram("request_prompt_tokens", "Number of prefill tokens processed.", sizes)
        self._generation = histogram("request_generation_tokens", "Number of generation tokens processed.", sizes)

    def observe_failure(self, error: Exception) -> None:
        """Counts a sequence that the server failed."""
        self.consecutive_failures += 1
        self.last_failure = str(error)

    def exposition(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self.registry)

    def observe_chunk(self, chunk: Chunk, previous: float | None) -> float | None:
        """Counts inter-token latencies; `previous` is the time of the step before; returns the time of the last."""
        for time in chunk.emitted:
            if previous is not None:
                self._seconds["inter_token_latency"].observe(time - previous)
            previous = time
        return previous

    def observe_completion(self, num_prompt_tokens: int, completion: Completion) -> None:
        """Counts a finished sequence."""
        self.consecutive_failures = 0
        self._num_prompt_tokens += num_prompt_tokens
        self._prompt.observe(num_prompt_tokens)
        self._generation.observe(len(completion.token_ids))
        queue, ttft = completion.queue_seconds or 0.0, completion.ttft_seconds
        self._observe("e2e_request_latency", completion.seconds)
        self._observe("request_queue_time", queue)
        self._observe("request_inference_time", completion.seconds - queue)
        self._observe("time_to_first_token", ttft)
        self._observe("request_prefill_time", None if ttft is None else ttft - queue)
        self._observe("request_decode_time", None if ttft is None else completion.seconds - ttft)
        self._observe("request_time_per_output_token", completion.itl_seconds)

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._seconds[name].observe(seconds)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering does not read the backend."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the families of counters and gauges from one snapshot."""
        metrics = self._backend.metrics()
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, attrgetter(field)(metrics))
            yield gauge
        for name, (field, text) in COUNTERS.items():
            yield self._counter(name, text, {(): attrgetter(field)(metrics)})
        yield self._counter("vllm:prompt_tokens", "Number of prefill tokens processed.", {(): self._num_prompt_tokens})
        counts = metrics.acceptance.accepted_by_position
        counts += (0,) * (self._backend.num_draft_tokens - len(counts))
        positions: dict[tuple[str, ...], int] = {  # vLLM's count from 0
            (str(index),): count for index, count in enumerate(counts)
        }
        text = "Accepted tokens per draft position."
        yield self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, positions, "position")
        finished = {str(reason): number for reason, number in metrics.finished.items()}
        reasons: dict[tuple[str, ...], int] = {
            (vllm_reason,): finished.get(reason, 0) for reason, vllm_reason in REASONS.items()
        }
        text = "Count of successfully processed requests."
        yield self._counter("vllm:request_success", text, reasons, "finished_reason")

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, ...], int], *labels: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, *labels))
        for label_values, value in values.items():
            family.add_metric((*self._labels, *label_values), value)
        return family


def _one_two_five(limit: int) -> list[float]:
    """Buckets 1, 2, 5, 10, 20, ... up to `limit`."""
    return [m * 10**e for e in range(len(str(limit))) for m in (1, 2, 5) if m * 10**e <= limit]
