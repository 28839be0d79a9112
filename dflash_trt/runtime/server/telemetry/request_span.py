# SPDX-License-Identifier: Apache-2.0
"""The OpenTelemetry span of a request, with children for its queue, prefill and decode.

Attributes are those of the GenAI semantic conventions 1.44, and latencies have vLLM's names
(vllm/tracing/utils.py): https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
They contain no text of a client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SAMPLER_FIELDS
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.disconnect import ClientDisconnected
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.request.generation_request import GenerationRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

CANCELLED = (asyncio.CancelledError, ClientDisconnected, GeneratorExit)


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
        """Sets the attributes of the request."""
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
