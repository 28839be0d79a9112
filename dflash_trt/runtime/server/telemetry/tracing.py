# SPDX-License-Identifier: Apache-2.0
"""Exports OpenTelemetry traces over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflash_trt import __version__
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.telemetry.request_span import RequestSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPTION = "--otlp-traces-endpoint"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


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
