# SPDX-License-Identifier: Apache-2.0
"""Observability of a server: traces, /metrics by vLLM's names, the dashboard's queries, a log that never waits."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from dflash_trt.errors import RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.server.telemetry.log import MAX_QUEUED_LINES, NonBlockingHandler
from dflash_trt.runtime.server.telemetry.tracing import Tracing, open_tracing
from tests.runtime.server.live import LONG, MODEL, Live, serving, started
from tests.tools.dashboards.queries import expressions, metrics, selectors
from tests.waiting import PATIENCE, until


def test_every_metric_and_label_is_on_the_page(live: Live) -> None:
    live.complete(prompt="def f(", max_tokens=9, temperature=0)
    page: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            page.setdefault(sample.name, set()).update(sample.labels)
    assert metrics("dflash_trt") - set(page) == set()
    for expression in expressions("dflash_trt"):
        for selector in selectors(expression):
            asked = {matcher.name for matcher in selector.matchers.matchers} - {"instance"}  # Prometheus's own label
            assert asked <= page[selector.name], expression


# From vLLM's docs (usage/metrics) and sources (v1/metrics/loggers.py, v1/spec_decode/metrics.py).
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "acceptance.drafting_passes",
    "vllm:spec_decode_num_draft_tokens_total": "acceptance.proposed",
    "vllm:spec_decode_num_accepted_tokens_total": "acceptance.accepted",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
)  # fmt: skip
Samples = dict[tuple[str, str], float]


def scrape(live: Live) -> Samples:
    """By name and the last label's value."""
    samples: Samples = {}
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("vllm:"):
                assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            samples[sample.name, ",".join(labels.values())] = sample.value
    return samples


def test_counters_are_the_decoders(live: Live) -> None:
    before, steps = scrape(live), live.llm.metrics().acceptance.passes
    answers = [
        live.complete(prompt="def f(", max_tokens=30, temperature=0),
        live.complete(prompt="def f(", max_tokens=30, temperature=0, draft_length=0),  # counts for no draft
        live.complete(prompt=["import os", "class A"], max_tokens=9, temperature=0, ignore_eos=True),
    ]
    live.events(prompt="def f(", max_tokens=30, temperature=0)
    after, readings = scrape(live), live.llm.metrics()
    for name, field in COUNTERS.items():
        assert after[name, ""] == attrgetter(field)(readings), name
    for position in range(7):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert after[name, str(position)] == readings.acceptance.accepted_by_position[position]
    grown = {key: after[key] - before[key] for key in after if key in before}
    assert grown["vllm:prompt_tokens_total", ""] == sum(answer["usage"]["prompt_tokens"] for answer in answers) + 3
    figures = answers[0]["metrics"]["speculative_decoding"]
    assert grown["vllm:spec_decode_num_drafts_total", ""] > 2 * figures["num_spec_steps"]
    assert sum(grown["vllm:request_success_total", reason] for reason in ("stop", "length", "abort")) == 5
    for name in HISTOGRAMS:
        count = grown[f"{name}_count", ""]
        assert count == 5 if name != "vllm:inter_token_latency_seconds" else count == readings.acceptance.passes - steps
        assert after[f"{name}_bucket", "+Inf"] == after[f"{name}_count", ""]


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Traced:
    """A server, and the spans that it has ended."""

    def __init__(self, live: Live, exporter: InMemorySpanExporter) -> None:
        self.live = live
        self.exporter = exporter

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """The span of one request, and its children in the order of their beginnings; nothing else was traced."""
        until(lambda: any(span.kind is SpanKind.SERVER for span in self.exporter.get_finished_spans()))
        *children, parent = self.exporter.get_finished_spans()
        assert parent.kind is SpanKind.SERVER
        for child in children:
            assert (child.parent.trace_id, child.parent.span_id) == (parent.context.trace_id, parent.context.span_id)
        return parent, sorted(children, key=lambda span: span.start_time or 0)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Traced]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(llm, tracing=Tracing(provider)) as live:
        yield Traced(live, exporter)


@pytest.fixture
def traced(server: Traced) -> Iterator[Traced]:
    server.live.await_idle()
    server.exporter.clear()
    yield server
    server.live.await_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_queue_prefill_and_decode(traced: Traced, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dflash_trt.runtime.server")
    body = {"prompt": "def f(", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": stream}
    begin = time.time_ns()
    response = traced.live.http.post("/v1/completions", json=body, headers=TRACEPARENT)
    end = time.time_ns()
    assert response.status_code == 200
    span, children = traced.spans()
    assert (span.name, span.status.status_code) == (f"text_completion {MODEL}", StatusCode.UNSET)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    until(lambda: f"trace {TRACE}" in caplog.text)
    attributes = dict(span.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": MODEL, "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0, "gen_ai.request.stream": stream, "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.input_tokens": len(traced.live.llm.backend.encode("def f(")),
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert attributes.items() >= expected.items()
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    times = [time for child in children for time in (child.start_time or 0, child.end_time or 0)]
    whole = [begin, span.start_time or 0, *times, span.end_time or 0, end]
    slack = 10**6  # ns, between the two clocks
    assert all(b - a > -slack for a, b in pairwise(whole)), whole
    assert times[1:5:2] == times[2:5:2]
    latency = {name: attributes[f"gen_ai.latency.{name}"] for name in (
        "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e",
    )}  # fmt: skip
    for child, name in zip(children, ("queue", "model_prefill", "model_decode"), strict=True):
        assert ((child.end_time or 0) - (child.start_time or 0)) / 1e9 == pytest.approx(
            latency[f"time_in_{name}"], abs=1e-6
        )
    assert latency["e2e"] == pytest.approx((times[-1] - times[0]) / 1e9, abs=1e-6)
    decode = dict(children[2].attributes or {})
    assert 19 - 7 * decode["dflash_trt.steps"] <= decode["dflash_trt.steps"] <= 19  # type: ignore[operator]
    assert decode["dflash_trt.accepted_tokens"] <= decode["dflash_trt.draft_tokens"]  # type: ignore[operator]


def test_each_sequence_of_a_request_has_its_own(traced: Traced) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 3, "n": 2, "seed": 1}
    assert traced.live.http.post("/v1/chat/completions", json=body).status_code == 200
    span, children = traced.spans()
    assert (span.name, span.parent) == (f"chat {MODEL}", None)
    attributes = span.attributes or {}
    assert attributes["gen_ai.request.choice.count"] == 2
    assert len(attributes["gen_ai.response.finish_reasons"]) == 2  # type: ignore[arg-type]
    assert "gen_ai.latency.e2e" not in attributes
    sequences = {((c.attributes or {})["dflash_trt.choice.index"], c.name) for c in children}
    assert sequences == {(index, name) for index in range(2) for name in ("queue", "prefill", "decode")}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_span(traced: Traced, stream: bool) -> None:
    with traced.live.connect() as connection:
        body = httpx2.Request("POST", traced.live.url, json=LONG | {"stream": stream}).content
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        else:
            until(lambda: traced.live.llm.metrics().running > 0)
    span, _ = traced.spans()
    assert (span.status.status_code, (span.attributes or {})["error.type"]) == (StatusCode.ERROR, "cancelled")


def test_a_refusal_says_its_status_and_no_text(traced: Traced) -> None:
    assert traced.live.post(prompt="x", best_of="my secret").status_code == 400
    span, children = traced.spans()
    assert (span.status.status_code, (span.attributes or {})["error.type"], children) == (StatusCode.ERROR, "400", [])
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_says_its_error(traced: Traced, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer, too."""
    verify, num_good = ModelRunner.verify, 3 if stream else 0

    def verify_a_few(runner: ModelRunner, segments: Any) -> Any:
        nonlocal num_good
        num_good -= 1
        logits = verify(runner, segments)
        return logits if num_good >= 0 else logits * float("nan")

    monkeypatch.setattr(ModelRunner, "verify", verify_a_few)
    assert traced.live.post(**LONG | {"stream": stream}).status_code == (200 if stream else 500)
    span, _ = traced.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "NaN" in str(span.status.description)


@pytest.mark.parametrize(
    ("option", "environment", "words"),
    [("localhost:4317", {}, "--otlp-traces-endpoint: expected a URL like http"),
     (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}, "OTEL_EXPORTER_OTLP_ENDPOINT: expected a URL"),
     ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf")],
)  # fmt: skip
def test_what_cannot_be_exported_to_is_refused(
    option: str | None, environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=words):
        open_tracing(option)


def test_without_an_endpoint_there_is_no_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without the extra refuses only an endpoint."""
    script = (
        "import sys\nsys.modules['opentelemetry'] = None\n"
        "from dflash_trt.errors import RequestError\n"
        "from dflash_trt.runtime.server.telemetry.tracing import open_tracing\n"
        "assert open_tracing(None) is None\n"
        "try: open_tracing('http://localhost:4318/v1/traces')\n"
        "except RequestError as error: print(error.message, error.hint)\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("--otlp-traces-endpoint: expected the OpenTelemetry SDK")
    assert printed.endswith("pip install 'dflash-trt[serve]'\n")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert open_tracing(None) is None


@pytest.mark.full
@pytest.mark.parametrize("is_up", [True, False])
def test_the_command_exports(
    engine: Path, chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    """By the environment's variables, at the latest when it ends; a collector that is down only costs the spans."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        if is_up:
            threading.Thread(target=collector.serve_forever, daemon=True).start()
        else:
            collector.socket.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        with started(engine, chat_target, tmp_path / "log", "--served-model-name", "m") as process:
            url = process.await_url()
            body = {"prompt": "x", "max_tokens": 2}
            assert httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(PATIENCE) == 0
            assert "Traceback" not in process.text
        if is_up:
            collector.shutdown()
    assert bool(received) is is_up
    for path, sent in received:
        assert path == "/v1/traces"
        (spans,) = ExportTraceServiceRequest.FromString(sent).resource_spans
        resource = {pair.key: pair.value.string_value for pair in spans.resource.attributes}
        assert (resource["service.name"], "service.version" in resource) == ("ours", True)
        names = [span.name for scope in spans.scope_spans for span in scope.spans]
        assert names == ["queue", "prefill", "decode", "text_completion m"]


def test_errors_of_libraries_are_lines_of_the_log() -> None:
    """Python's own handler writes at once, to a reader that may not read."""
    code = "import logging; from dflash_trt.runtime.server.telemetry.log import set_up_logging; set_up_logging(); "
    code += "logging.getLogger('asyncio').error('an error'); logging.getLogger().handlers[0].flush()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[-0-9]+ [:0-9]+ an error\n", run.stderr)


def test_an_unread_log_loses_lines() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):  # ends when the pipe is full
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    handler = NonBlockingHandler(writing)
    for i in range(2 * MAX_QUEUED_LINES):
        handler.handle(logging.LogRecord("x", logging.INFO, "x", 1, f"line {i} {'x' * 200}", None, None))
    assert handler.num_dropped > 0
    os.close(reading)  # the thread's write ends with an error, and it goes on
    handler.flush()
    assert handler.is_idle
