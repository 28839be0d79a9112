# SPDX-License-Identifier: Apache-2.0
"""Exports OpenTelemetry traces over HTTP: a span for each request, with children for its queue, prefill and decode.

Attributes are those of the GenAI semantic conventions 1.44, and latencies have vLLM's names
(vllm/tracing/utils.py): https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
They contain no text of a client.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflash_trt import __version__
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SAMPLER_FIELDS
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.disconnect import ClientDisconnected
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.request.generation_request import GenerationRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer


CANCELLED = (asyncio.CancelledError, ClientDisconnected, GeneratorExit)
OPTION = "--otlp-traces-endpoint"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


class RequestSpan(AbstractContextManager["RequestSpan", None]):
    """Span of one request, which ends with the block; an exception sets its status."""

    def __init__(self, tracer: Tracer, parent: Context, operation: str, model: str) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = tracer
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._span = self._tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "dflash_trt",
                "gen_ai.request.model": model,
            },
        )
        self._context = set_span_in_context(self._span)
        self._finish_reasons: list[str] = []
        self._num_output_tokens = 0

    @property
    def trace_id(self) -> str:
        """Trace id, in 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def set_request(self, request: GenerationRequest, num_prompt_tokens: int) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._span.set_attribute("gen_ai.request.stream", request.body.stream)
        self._span.set_attribute("gen_ai.request.choice.count", request.body.n)
        if request.max_tokens is not None:
            self._span.set_attribute("gen_ai.request.max_tokens", request.max_tokens)
        for name in SAMPLER_FIELDS:
            if (value := getattr(request.params, name)) is not None:
                self._span.set_attribute(f"gen_ai.request.{name}", value)

    def add_completion(self, index: int, completion: Completion, *, is_only: bool) -> None:
        """Adds the children of the finished sequence `index`, and latencies if it `is_only` one."""
        self._num_output_tokens += len(completion.token_ids)
        self._finish_reasons.append(str(completion.finish_reason))
        self._span.set_attribute("gen_ai.usage.output_tokens", self._num_output_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", self._finish_reasons)
        queue, ttft, seconds = completion.queue_seconds or 0.0, completion.ttft_seconds, completion.seconds
        steps: dict[str, int | None] = {"output_tokens": len(completion.token_ids)}
        if (acceptance := completion.acceptance) is not None:
            steps |= {"steps": acceptance.all_passes, "draft_tokens": acceptance.proposed}
            steps["accepted_tokens"] = acceptance.accepted
        self._child("queue", index, completion.arrived, 0.0, queue)
        if ttft is not None:
            self._child("prefill", index, completion.arrived, queue, ttft)
            self._child("decode", index, completion.arrived, ttft, seconds, steps)
        if is_only:
            prefill, decode = (None, None) if ttft is None else (ttft - queue, seconds - ttft)
            for name, value in {
                "time_in_queue": queue, "time_to_first_token": ttft, "time_in_model_prefill": prefill,
                "time_in_model_decode": decode, "time_in_model_inference": seconds - queue, "e2e": seconds,
            }.items():  # fmt: skip
                if value is not None:
                    self._span.set_attribute(f"gen_ai.latency.{name}", value)

    def _child(
        self, name: str, index: int, arrived: float, begin: float, end: float, steps: Mapping[str, int | None] = {}
    ) -> None:
        times = [self._epoch + int((arrived + seconds) * 1e9) for seconds in (begin, end)]
        attributes = {f"dflash_trt.{key}": value for key, value in steps.items() if value is not None}
        attributes["dflash_trt.choice.index"] = index
        self._tracer.start_span(name, self._context, attributes=attributes, start_time=times[0]).end(times[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from opentelemetry.trace import StatusCode

        if isinstance(error, CANCELLED):
            self._span.set_attribute("error.type", "cancelled")
            self._span.set_status(StatusCode.ERROR, "the client disconnected, or the server shut down")
        elif isinstance(error, RequestError) or (isinstance(error, HttpError) and error.status < 500):
            status = error.status if isinstance(error, HttpError) else 400
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(StatusCode.ERROR)  # the message may quote the client
        elif error is not None:
            status_or_class = str(error.status) if isinstance(error, HttpError) else type(error).__qualname__
            self._span.set_attribute("error.type", status_or_class)
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Exports to the URL `endpoint`, or to that of the environment; returns None without either.

    OTEL_* variables set the rest. Raises RequestError for another URL than http, for OTLP over gRPC, and where the
    extra is missing.
    """
    name, url = next(((each, os.environ[each]) for each in ENDPOINTS if os.environ.get(each)), (OPTION, ""))
    if endpoint is not None:
        name, url = OPTION, endpoint
    elif not url or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise RequestError(f"{name}: expected a URL like http://localhost:4318/v1/traces, found {url}")
    for variable in PROTOCOLS:
        if (protocol := os.environ.get(variable, PROTOCOL)) != PROTOCOL:
            raise RequestError(f"{variable}: expected {PROTOCOL}, found {protocol}", hint=f"set it to {PROTOCOL}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise RequestError(
            f"{name}: expected the OpenTelemetry SDK and its OTLP exporter, which are not installed",
            hint="pip install 'dflash-trt[serve]'",
        ) from None
    ours = Resource.create({"service.name": "dflash-trt", "service.version": __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


class Tracing:
    """Starts the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("dflash_trt.runtime.server", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, operation: str, model: str, headers: Mapping[str, str]) -> RequestSpan:
        """Starts the span of one request, a child of the one that its `traceparent` names."""
        return RequestSpan(self._tracer, self._propagator.extract(headers), operation, model)
