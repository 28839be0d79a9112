# SPDX-License-Identifier: Apache-2.0
"""The meter for a server, and acceptance during a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_meter import CounterMeter
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES, VLLM, CounterNames
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.iteration_meter import IterationMeter
from dflash_trt.observe.endpoints.meter import Meter
from dflash_trt.observe.endpoints.metrics_page import MetricsPage, read_page
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, Source


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
