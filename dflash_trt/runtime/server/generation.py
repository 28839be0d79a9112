# SPDX-License-Identifier: Apache-2.0
"""Generates the answer to one request, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, SamplingParams
from dflash_trt.errors import EngineError
from dflash_trt.runtime.server import response_bodies
from dflash_trt.runtime.server.answer_choice import Choice, has_content
from dflash_trt.runtime.server.answer_logprobs import TokenTexts
from dflash_trt.runtime.server.answer_memory import answer_bytes
from dflash_trt.runtime.server.http_error import shutting_down
from dflash_trt.runtime.server.merge_streams import merge_streams
from dflash_trt.runtime.server.prometheus import ServerMetrics
from dflash_trt.runtime.server.request_span import RequestSpan
from dflash_trt.runtime.server.requests import GenerationRequest
from dflash_trt.runtime.server.response_bodies import ChatChoice, ChatCompletion, Document, Metrics, TextChoice, Usage
from dflash_trt.runtime.server.served_backend import ServedBackend
from dflash_trt.runtime.server.usage import completion_metrics, usage

WHOLE: Literal["chat.completion"] = "chat.completion"
CHUNK: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class Generation:
    """All sequences of one request, decoded together."""

    def __init__(
        self,
        backend: ServedBackend,
        model: str,
        metrics: ServerMetrics,
        request: GenerationRequest,
        prompt_ids: list[list[int]],
        token_texts: TokenTexts,
        client: str,
        span: RequestSpan | None = None,
    ) -> None:
        self.log_fields: dict[str, object] = {"prompt_tokens": sum(map(len, prompt_ids)), "output_tokens": 0}
        """Fields for the access log."""
        self._backend = backend
        self._client = client
        self._model = model
        self._metrics = metrics
        self._request = request
        self._id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequences = [(ids, self._params(ids, i)) for ids in prompt_ids for i in range(request.body.n)]
        self._num_prompt_tokens = sum(map(len, prompt_ids))
        self._span = span
        if span is not None:
            span.set_request(request, self._num_prompt_tokens)
            self.log_fields["trace"] = span.trace_id
        self._choices = [
            Choice(index, request, ids, backend.tokenizer, token_texts)
            for index, (ids, _) in enumerate(self._sequences)
        ]
        self._last_emitted: list[float | None] = [None] * len(self._sequences)

    @property
    def max_bytes(self) -> int:
        """Most memory that the answers may take; a request that is longer than the context is refused later."""
        num_step_tokens = 2 * self._backend.num_draft_tokens + 1 if self._request.body.return_steps else 0
        longest = self._backend.max_length
        return sum(
            answer_bytes(
                len(ids), msgspec.structs.replace(params, max_tokens=min(params.max_tokens, longest)), num_step_tokens
            )
            for ids, params in self._sequences
        )

    async def response(self) -> Document:
        """The answer to a request without `stream`."""
        choices: dict[int, TextChoice | ChatChoice] = {}
        async with aclosing(self._chunks(incremental=False)) as chunks:
            async for choice, chunk in chunks:
                choices[choice.index] = choice.add(chunk, is_delta=False)
        ordered = [choices[index] for index in range(len(choices))]
        return self._document(ordered, usage(self._num_prompt_tokens, self._choices), self._answer_metrics())

    async def events(self) -> AsyncGenerator[Document, None]:
        """The events of a streamed answer; the last one has usage or metrics."""
        options = self._request.stream_options
        async with aclosing(self._chunks(incremental=True)) as chunks:
            async for choice, chunk in chunks:
                delta = choice.add(chunk, is_delta=True)
                counts: Usage | UnsetType | None = None if options.include_usage else UNSET
                if options.include_usage and options.continuous_usage_stats:
                    counts = usage(len(self._sequences[choice.index][0]), [choice])
                is_last = all(each.completion is not None for each in self._choices)
                metrics = self._answer_metrics() if is_last and not options.include_usage else UNSET
                if has_content(delta):
                    yield self._document([delta], counts, metrics)
        if options.include_usage:
            yield self._document([], usage(self._num_prompt_tokens, self._choices), self._answer_metrics())

    async def _chunks(self, *, incremental: bool) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        streams = [
            self._backend.stream(ids, params, incremental=incremental, client=self._client)
            for ids, params in self._sequences
        ]
        try:
            async with aclosing(merge_streams(streams)) as chunks:
                async for index, chunk in chunks:
                    self._last_emitted[index] = self._metrics.observe_chunk(chunk, self._last_emitted[index])
                    if chunk.completion is not None:
                        self._finish(index, chunk.completion)
                    yield self._choices[index], chunk
        except EngineError as error:
            if not self._backend.is_alive and self._backend.error is None:  # it was closed since the request came
                raise shutting_down() from None
            self._metrics.observe_failure(error)
            raise

    def _finish(self, index: int, completion: Completion) -> None:
        self._metrics.observe_completion(len(self._sequences[index][0]), completion)
        if self._span is not None:
            self._span.add_completion(index, completion, is_only=len(self._sequences) == 1)
        if completion.finish_reason == "cancelled":
            raise shutting_down()
        self.log_fields["output_tokens"] = int(str(self.log_fields["output_tokens"])) + len(completion.token_ids)
        if len(self._sequences) == 1 and completion.tau is not None:
            self.log_fields["tau"] = f"{completion.tau:.2f}"

    def _document(
        self, choices: Sequence[Any], usage: Usage | UnsetType | None, metrics: Metrics | UnsetType | None
    ) -> Document:
        shared: dict[str, Any] = {"id": self._id, "created": self._created, "model": self._model}
        shared |= {"choices": choices, "usage": usage, "metrics": metrics}
        if not self._request.is_chat:
            return response_bodies.Completion(**shared)
        return ChatCompletion(**shared, object=CHUNK if self._request.body.stream else WHOLE)

    def _answer_metrics(self) -> Metrics | None:
        """Measurements of the only sequence; None where there are several."""
        completion = self._choices[0].completion
        if len(self._sequences) > 1 or completion is None:
            return None
        return completion_metrics(completion, self._backend.num_draft_tokens)

    def _params(self, prompt_ids: list[int], index: int) -> SamplingParams:
        """Parameters of sequence `index` of a prompt."""
        params, limit = self._request.params, self._request.max_tokens
        if limit is None:
            limit = min(DEFAULT_CHAT_TOKENS, self._backend.max_length - len(prompt_ids))
        return msgspec.structs.replace(params.nth(index), max_tokens=max(1, limit))
