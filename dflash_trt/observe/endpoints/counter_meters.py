# SPDX-License-Identifier: Apache-2.0
"""Acceptance from Prometheus counters, by difference; one class for each runtime.

vLLM (and ours): vllm/v1/spec_decode/metrics.py. SGLang: counters of finished requests and gauges,
sglang/srt/observability/metrics_collector.py. TensorRT-LLM: counters of finished requests under /prometheus/metrics
(return_perf_metrics), tensorrt_llm/metrics/collector.py.
"""

from __future__ import annotations

import time

from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import increase, increase_by_position
from dflash_trt.observe.endpoints.meter import Meter
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting

IDLE_SECONDS = 10.0  # for counters that are updated after the last answer, and for abandoned requests
VLLM = "vllm:spec_decode_num"
SGLANG_STEPS = "sglang:spec_verify_calls_total"
TRTLLM = "trtllm_spec_decode"


class CounterMeter(Meter):
    """Prometheus counters, by difference."""

    path = "/metrics"
    running: tuple[str, ...] = ()
    """Gauges that are 0 once every request is counted."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: MetricsPage | None = None

    def begin(self) -> None:
        self._before = self._read_idle()

    def end(self) -> ObservedAcceptance:
        assert self._before is not None
        return self.difference(self._before, self._read_idle())

    def difference(self, before: MetricsPage, after: MetricsPage) -> ObservedAcceptance:
        """Acceptance between two scrapes of the page."""
        raise NotImplementedError

    def _read(self) -> MetricsPage:
        return MetricsPage.parse(self._client.get(self.path), f"{self._client.url}{self.path}")

    def _read_idle(self) -> MetricsPage:
        deadline = time.monotonic() + IDLE_SECONDS
        page = self._read()
        while any(page.total(name) for name in self.running) and time.monotonic() < deadline:
            time.sleep(0.05)
            page = self._read()
        return page


class VllmMeter(CounterMeter):
    """vLLM's counters; a pass that verified no draft counts for none of them, and its positions count from 0."""

    running = ("vllm:num_requests_running", "vllm:num_requests_waiting")

    def difference(self, before: MetricsPage, after: MetricsPage) -> ObservedAcceptance:
        """Tau of drafting passes is 1 + accepted / drafts in vLLM's words."""
        return ObservedAcceptance(
            source="counters",
            how="vllm:spec_decode_num_drafts, _draft_tokens, _accepted_tokens and _accepted_tokens_per_pos",
            counts=drafting(
                increase(before, after, f"{VLLM}_drafts_total"),
                increase(before, after, f"{VLLM}_accepted_tokens_total"),
                increase(before, after, f"{VLLM}_draft_tokens_total"),
                increase_by_position(before, after, f"{VLLM}_accepted_tokens_per_pos_total", "position"),
            ),
            output_tokens=increase(before, after, "vllm:generation_tokens_total"),
        )


class SglangMeter(CounterMeter):
    """SGLang's counters of finished requests; without them, the gauge while requests run."""

    sample_seconds = 1.0
    running = ("sglang:num_running_reqs", "sglang:num_queue_reqs")

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._samples: list[float] = []

    def sample(self) -> None:
        """The gauge of the average over the last log interval, which counts the bonus token, too."""
        page = self._read()
        if page.total("sglang:num_running_reqs"):
            values = [value for _, value in page.samples.get("sglang:spec_accept_length", ()) if value > 0]
            self._samples += values

    def difference(self, before: MetricsPage, after: MetricsPage) -> ObservedAcceptance:
        """SGLang counts no accepted drafts: they are what requests kept beyond one token for each pass and prefill."""
        output = increase(before, after, "sglang:generation_tokens_total")
        if steps := increase(before, after, SGLANG_STEPS):
            requests = increase(before, after, "sglang:num_requests_total")
            return ObservedAcceptance(
                source="counters",
                how="sglang:spec_verify_calls_total; accepted = generation_tokens - num_requests - spec_verify_calls: "
                "drafts that requests kept, without those behind their end",
                counts=drafting(steps, max(0, output - requests - steps), None),
                output_tokens=output,
            )
        if not self._samples:
            why = "sglang:spec_verify_calls_total did not grow, and sglang:spec_accept_length had no value meanwhile"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        return ObservedAcceptance(
            source="gauges",
            how=f"mean of {len(self._samples)} samples of sglang:spec_accept_length, which counts the bonus token",
            sampled_tau=sum(self._samples) / len(self._samples),
            output_tokens=output,
        )


class TrtllmMeter(CounterMeter):
    """TensorRT-LLM's counters of finished requests by position: its position 0 is drafted once in each pass."""

    path = "/prometheus/metrics"
    running = ("trtllm_num_requests_running", "trtllm_num_requests_waiting")

    def difference(self, before: MetricsPage, after: MetricsPage) -> ObservedAcceptance:
        """TensorRT-LLM's own acceptance length, (accepted + requests) / requests, is tau of drafting passes."""
        drafted = increase_by_position(before, after, f"{TRTLLM}_drafted_tokens_total", "token_position")
        accepted = increase_by_position(before, after, f"{TRTLLM}_accepted_tokens_total", "token_position")
        output = increase(before, after, "trtllm_generation_tokens_total")
        if not drafted:
            why = f"{TRTLLM}_drafted_tokens_total did not grow: no drafts, or a release without it"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        return ObservedAcceptance(
            source="counters",
            how=f"{TRTLLM}_drafted_tokens and _accepted_tokens by position; drafting passes = drafted at position 0",
            counts=drafting(drafted[0], sum(accepted), sum(drafted), accepted),
            output_tokens=output,
        )
