# SPDX-License-Identifier: Apache-2.0
"""Acceptance between two moments, by what a server publishes: counters, statistics of iterations, or nothing."""

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
from dflash_trt.observe.endpoints.counter_growth import acceptance_of, grown
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES, VLLM, CounterNames
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, Source, drafting

IDLE_SECONDS = 10.0  # for counters that are updated after the last answer, and for abandoned requests
HOW = "specDecodingStats of iterations: drafting passes = numRequestsWithDraftTokens, numDraftTokens, numAcceptedTokens"


class Meter:
    """Base of all meters."""

    sample_seconds: float | None = None
    """How often `sample` wants to be called while requests run; None: never."""

    def begin(self) -> None:
        """Now begins what is counted."""

    def sample(self) -> None:
        """Between `begin` and `end`."""

    def end(self) -> ObservedAcceptance:
        """Counts since `begin`; raises EndpointError if counters went backwards, because the server was restarted."""
        raise NotImplementedError


class CounterMeter(Meter):
    """Growth of the counters; where they do not grow, samples of a gauge while requests run, if there is one."""

    def __init__(self, client: Client, names: CounterNames) -> None:
        self._client, self._names = client, names
        self._before: MetricsPage | None = None
        self._samples: list[float] = []
        self.sample_seconds = 1.0 if names.sampled_tau else None

    def begin(self) -> None:
        self._before = self._read_idle()

    def sample(self) -> None:
        """The gauge of the average over the last log interval, which counts the bonus token, too."""
        page = self._read()
        if page.total(self._names.running):
            self._samples += [value for _, value in page.samples.get(self._names.sampled_tau, ()) if value > 0]

    def end(self) -> ObservedAcceptance:
        assert self._before is not None
        names = self._names
        growth = grown(self._before, self._read_idle(), names.drafts)
        for name in names.drafts:
            growth.count(name)  # whole numbers, of which nothing is rounded away
        counts, output = acceptance_of(growth, names), growth.count(names.output_tokens)
        if counts.drafting_passes or (growth.has(names.passes) and not names.sampled_tau):
            return ObservedAcceptance(source="counters", how=names.how, counts=counts, output_tokens=output)
        if not names.sampled_tau:
            why = f"{names.passes} did not grow: no drafts, or a release without it"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        if not self._samples:
            why = f"{names.passes} did not grow, and {names.sampled_tau} had no value meanwhile"
            return ObservedAcceptance(source="not published", how=why, output_tokens=output)
        return ObservedAcceptance(
            source="gauges",
            how=f"mean of {len(self._samples)} samples of {names.sampled_tau}, which counts the bonus token",
            sampled_tau=sum(self._samples) / len(self._samples),
            output_tokens=output,
        )

    def _read(self) -> MetricsPage:
        return read_page(self._client, self._names.path)

    def _read_idle(self) -> MetricsPage:
        """The page once no request runs or waits, as each is counted at its end."""
        deadline = time.monotonic() + IDLE_SECONDS
        page = self._read()
        while any(map(page.total, (self._names.running, self._names.waiting))) and time.monotonic() < deadline:
            time.sleep(0.05)
            page = self._read()
        return page


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
    """The sum over TensorRT-LLM's iterations, which GET /metrics hands out once (enable_iter_perf_stats).

    Names are those of SpecDecodingStats in executor/types.h.
    """

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
    if page is not None and page.has(VLLM.passes):
        return CounterMeter(client, VLLM)
    if page is None and runtime.kind in ("dflash-trt", "vllm"):
        return NoMeter("GET /metrics is a 404: if this is a gateway, ask the server itself")
    if runtime.kind in ("dflash-trt", "vllm"):
        return NoMeter("its /metrics has no vllm:spec_decode_* counters: it decodes without drafts")
    names = COUNTER_NAMES.get(runtime.kind, VLLM)
    if runtime.kind == "sglang":
        return NoMeter("start it with --enable-metrics") if page is None else CounterMeter(client, names)
    if runtime.kind == "tensorrt-llm":
        return CounterMeter(client, names) if _counts_positions(client, names) else IterationMeter(client)
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


def _counts_positions(client: Client, names: CounterNames) -> bool:
    """Whether it has counters by position, or may have: none shows before the first request has finished."""
    page = _page(client, names.path)
    return page is not None and (page.has(names.passes) or not page.has("trtllm_request_success_total"))


def _page(client: Client, path: str) -> MetricsPage | None:
    """None for a 404; raises EndpointError for a page that cannot be read."""
    try:
        return read_page(client, path)
    except EndpointError as error:
        if error.status != 404:
            raise
        return None
