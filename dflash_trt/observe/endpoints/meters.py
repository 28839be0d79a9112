# SPDX-License-Identifier: Apache-2.0
"""Acceptance between two moments, from what each runtime publishes; one small class for each way.

vLLM (and ours): counters, vllm/v1/spec_decode/metrics.py. SGLang: counters of finished requests and gauges,
sglang/srt/observability/metrics_collector.py. TensorRT-LLM: counters of finished requests under /prometheus/metrics
(return_perf_metrics), tensorrt_llm/metrics/collector.py, or the statistics of its iterations, which GET /metrics hands
out once (enable_iter_perf_stats), SpecDecodingStats in executor/types.h.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from dflash_trt.api.acceptance import Count
from dflash_trt.errors import EndpointError
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.observed_acceptance import Meter, MetricsPage, ObservedAcceptance, Source, drafting

HOW = "specDecodingStats of iterations: drafting passes = numRequestsWithDraftTokens, numDraftTokens, numAcceptedTokens"
IDLE_SECONDS = 10.0  # for counters that lag behind the last answer, and for requests that were given up
VLLM = "vllm:spec_decode_num"
SGLANG_STEPS = "sglang:spec_verify_calls_total"
TRTLLM = "trtllm_spec_decode"


def meter(client: Client, runtime: Runtime) -> Meter:
    """The meter for what `runtime` publishes; a server that publishes nothing, or no valid page, gets a NoMeter."""
    try:
        return _meter(client, runtime)
    except EndpointError as error:
        return NoMeter(f"its metrics cannot be read: {error.message}", source="unreadable")


def _meter(client: Client, runtime: Runtime) -> Meter:
    try:
        page = _page(client, "/metrics")
    except EndpointError:
        if runtime.kind not in ("tensorrt-llm", "unknown"):  # TensorRT-LLM's /metrics is JSON
            raise
        page = None
    if page is not None and page.has(f"{VLLM}_drafts_total"):
        return VllmMeter(client)
    if runtime.kind in ("dflash-trt", "vllm"):
        return NoMeter("its /metrics has no vllm:spec_decode_* counters: it decodes without drafts")
    if runtime.kind == "sglang":
        return NoMeter("start it with --enable-metrics") if page is None else SglangMeter(client)
    if runtime.kind == "tensorrt-llm":
        return TrtllmMeter(client) if _counts_positions(client) else IterationMeter(client)
    if runtime.kind == "triton":
        return NoMeter("Triton's OpenAI frontend leaves acceptance out; its llmapi model reports it per request")
    return NoMeter("the metrics of this runtime are not known")


@contextmanager
def acceptance_during(meter: Meter) -> Iterator[Callable[[], ObservedAcceptance]]:
    """Counts what happens in the block, and samples meanwhile; the function, called at its end, says what it was."""
    over = threading.Event()

    def sample() -> None:
        while meter.sample_seconds is not None and not over.wait(meter.sample_seconds):
            meter.sample()

    meter.begin()
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()

    def end() -> ObservedAcceptance:
        over.set()
        thread.join()
        return meter.end()

    try:
        yield end
    finally:
        over.set()
        thread.join()


class NoMeter(Meter):
    """Where nothing is published."""

    def __init__(self, why: str, source: Source = "not published") -> None:
        self._acceptance = ObservedAcceptance(source=source, how=why)

    def end(self) -> ObservedAcceptance:
        return self._acceptance


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


def increase(before: MetricsPage, after: MetricsPage, name: str) -> int:
    """By how much a counter has grown; raises EndpointError where it went backwards."""
    return _difference(before.count(name), after.count(name), name, after.where)


def increase_by_position(before: MetricsPage, after: MetricsPage, name: str, label: str) -> tuple[int, ...]:
    """`increase` at position 1, 2, ..., whose label is 0, 1, ..."""
    ends, begins = after.positions(name, label), before.positions(name, label)
    begins += (0,) * (len(ends) - len(begins))
    return tuple(_difference(begin, end, name, after.where) for begin, end in zip(begins, ends, strict=True))


def _difference(before: int, after: int, name: str, where: str) -> int:
    if after < before:
        raise EndpointError(
            f"{where}: expected {name} to grow, found {after} after {before}",
            hint="the server was restarted in between: measure again",
        )
    return after - before


def _counts_positions(client: Client) -> bool:
    """Whether it has counters by position, or may have: none shows before the first request has finished."""
    page = _page(client, TrtllmMeter.path)
    name = f"{TRTLLM}_drafted_tokens_total"
    return page is not None and (page.has(name) or not page.has("trtllm_request_success_total"))


def _page(client: Client, path: str) -> MetricsPage | None:
    """None where it has no such page; raises EndpointError for one that cannot be read."""
    try:
        content = client.get(path)
    except EndpointError as error:
        if error.status is None:
            raise
        return None
    return MetricsPage.parse(content, f"{client.url}{path}")


class _DraftCounts(msgspec.Struct, frozen=True, rename="camel"):
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    num_requests_with_draft_tokens: Count = 0


class _Iteration(msgspec.Struct, frozen=True, rename="camel"):
    iter: int | None = None
    attention_dp_rank: int | None = 0
    """Ranks of attention data parallelism repeat what rank 0 says."""
    spec_decoding_stats: _DraftCounts | None = None


class IterationMeter(Meter):
    """The sum over iterations, and whether all were seen."""

    sample_seconds = 0.5

    def __init__(self, client: Client) -> None:
        self._client, self._where = client, f"{client.url}/metrics"
        self._reset()

    def _reset(self) -> None:
        self._counts = drafting(0, 0, 0)
        self._num_iterations = self._num_lost = 0
        self._last: int | None = None

    def begin(self) -> None:
        self.sample()
        self._reset()

    def sample(self) -> None:
        rows = json_document(self._client.get("/metrics"), self._where, EndpointError, finite=False)
        if isinstance(rows, list):  # some releases send each as a text
            rows = [self._document(row) if isinstance(row, str) else row for row in rows]
        try:
            iterations = msgspec.convert(rows, list[_Iteration])
        except msgspec.ValidationError as error:
            raise EndpointError(f"{self._where}: expected a list of iterations, found {error}") from None
        for iteration in iterations:
            if not iteration.attention_dp_rank:
                self._add(iteration)

    def _document(self, text: str) -> object:
        return json_document(text.encode(), self._where, EndpointError, finite=False)

    def _add(self, iteration: _Iteration) -> None:
        self._num_iterations += 1
        if iteration.iter is not None:
            if self._last is not None:
                self._num_lost += max(0, iteration.iter - self._last - 1)
            self._last = iteration.iter
        stats = iteration.spec_decoding_stats
        if stats is not None and stats.num_draft_tokens:
            self._counts += drafting(
                stats.num_requests_with_draft_tokens, stats.num_accepted_tokens, stats.num_draft_tokens
            )

    def end(self) -> ObservedAcceptance:
        self.sample()
        if not self._num_iterations:
            why = "GET /metrics lists no iterations: set enable_iter_perf_stats (or return_perf_metrics)"
            return ObservedAcceptance(source="not published", how=why)
        if not self._counts.drafting_passes:
            return ObservedAcceptance(source="not published", how="no iteration had specDecodingStats: no drafts")
        if not self._num_lost:
            return ObservedAcceptance(source="counters", how=HOW, counts=self._counts)
        how = f"{HOW}, without {self._num_lost} iterations that were dropped or taken by another client"
        return ObservedAcceptance(source="gauges", how=how, sampled_tau=self._counts.tau_of_drafting_passes)
