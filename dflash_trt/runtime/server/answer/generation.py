# SPDX-License-Identifier: Apache-2.0
"""Generates the answer to one request, whole or as events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, SamplingParams
from dflash_trt.errors import EngineError
from dflash_trt.runtime.server.answer import bodies as response_bodies
from dflash_trt.runtime.server.answer.answer_logprobs import TokenTexts
from dflash_trt.runtime.server.answer.bodies import ChatChoice, ChatCompletion, Document, Metrics, TextChoice, Usage
from dflash_trt.runtime.server.answer.choice import Choice, has_content
from dflash_trt.runtime.server.answer.inbox import Inbox
from dflash_trt.runtime.server.answer.usage import completion_metrics, usage
from dflash_trt.runtime.server.client_limits import answer_bytes
from dflash_trt.runtime.server.http_error import shutting_down
from dflash_trt.runtime.server.request.generation_request import GenerationRequest
from dflash_trt.runtime.server.served_backend import ServedBackend
from dflash_trt.runtime.server.telemetry.prometheus import ServerMetrics
from dflash_trt.runtime.server.telemetry.tracing import RequestSpan

if TYPE_CHECKING:
    from dflash_trt.runtime.request import Request


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
        self._running: list[Request] = []
        self._is_over = False
        self._num_open, self._num_output_tokens = len(self._sequences), 0
        self._whole: dict[int, TextChoice | ChatChoice] = {}

    @property
    def max_bytes(self) -> int:
        """Most memory that the answers may take; a request that is longer than the context is refused later."""
        num_step_tokens = 2 * self._backend.num_draft_tokens + 1 if self._request.body.return_steps else 0
        longest = self._backend.max_length
        return sum(
            answer_bytes(len(ids), min(params.max_tokens, longest), params, num_step_tokens)
            for ids, params in self._sequences
        )

    async def whole(self, inbox: Inbox) -> Document:
        """The answer to a request without `stream`."""
        answer: asyncio.Future[Document] = asyncio.get_running_loop().create_future()

        def end(error: Exception | None) -> None:
            if error is not None and not answer.done():
                answer.set_exception(error)

        self.start(inbox, answer.set_result, end)
        return await answer

    def start(self, inbox: Inbox, put: Callable[[Document], None], end: Callable[[Exception | None], None]) -> None:
        """Submits all sequences; `put` gets the documents of the answer, `end` then None or an error.

        Raises RequestError for an invalid request, and HttpError 503 while the server shuts down.
        """
        self._put, self._end = put, end
        self._later = asyncio.get_running_loop().call_soon  # once other requests have the tokens of the same step, too
        requests = []
        for index, (ids, params) in enumerate(self._sequences):
            receive = inbox.sender(partial(self._receive, index))
            requests.append(self._backend.request(ids, params, receive, incremental=self._request.body.stream))
        try:
            for request in requests:
                request.client = self._client
                self._backend.submit(request)
                self._running.append(request)
        except EngineError as error:
            raise self._explain(error) from None

    def cancel(self) -> None:
        """Ends the sequences that are still running, and lets go of all, which refer to this; nothing more is put."""
        self._is_over = True
        for request in self._running:
            self._backend.cancel(request)
        self._running.clear()

    def _receive(self, index: int, item: Chunk | Exception) -> None:
        if self._is_over:
            return
        try:
            if isinstance(item, Exception):
                raise item
            self._add(index, item)
        except EngineError as error:
            self._end(self._explain(error))
        except Exception as error:
            self._end(error)

    def _explain(self, error: EngineError) -> Exception:
        """The error to report: 503 if the server has begun to shut down, else the failure itself, which is counted."""
        if not self._backend.is_alive and self._backend.error is None:
            return shutting_down()
        self._metrics.observe_failure(error)
        return error

    def _add(self, index: int, chunk: Chunk) -> None:
        """Adds a chunk to the answer of its sequence."""
        choice, is_stream = self._choices[index], self._request.body.stream
        self._last_emitted[index] = self._metrics.observe_chunk(chunk, self._last_emitted[index])
        if chunk.completion is not None:
            self._num_open -= 1
            if chunk.completion.finish_reason == "cancelled":
                self._count(index, chunk.completion)
                raise shutting_down()
            self._later(self._count, index, chunk.completion)
        part = choice.add(chunk, is_delta=is_stream)
        if is_stream:
            self._put_event(choice, part)
        else:
            self._whole[index] = part
        if self._num_open == 0:
            if not is_stream or self._request.stream_options.include_usage:
                ordered = [self._whole[index] for index in sorted(self._whole)]
                counts = usage(self._num_prompt_tokens, self._choices)
                self._put(self._document(ordered, counts, self._answer_metrics()))
            self._later(self._end, None)

    def _put_event(self, choice: Choice, delta: TextChoice | ChatChoice) -> None:
        if not has_content(delta):
            return
        options = self._request.stream_options
        counts: Usage | UnsetType | None = None if options.include_usage else UNSET
        if options.include_usage and options.continuous_usage_stats:
            counts = usage(len(self._sequences[choice.index][0]), [choice])
        is_last = self._num_open == 0 and not options.include_usage
        self._put(self._document([delta], counts, self._answer_metrics() if is_last else UNSET))

    def _count(self, index: int, completion: Completion) -> None:
        """Adds a finished sequence to metrics, span and log."""
        self._metrics.observe_completion(len(self._sequences[index][0]), completion)
        if self._span is not None:
            self._span.add_completion(index, completion, is_only=len(self._sequences) == 1)
        if completion.finish_reason == "cancelled":
            return
        self._num_output_tokens += len(completion.token_ids)
        self.log_fields["output_tokens"] = self._num_output_tokens
        if len(self._sequences) == 1 and completion.tau is not None:
            self.log_fields["tau"] = f"{completion.tau:.2f}"

    def _document(
        self, choices: list[Any], usage: Usage | UnsetType | None, metrics: Metrics | UnsetType | None
    ) -> Document:
        if self._request.is_chat:
            return ChatCompletion(
                id=self._id, created=self._created, model=self._model, usage=usage, metrics=metrics, choices=choices,
                object="chat.completion.chunk" if self._request.body.stream else "chat.completion",
            )  # fmt: skip
        return response_bodies.Completion(
            id=self._id, created=self._created, model=self._model, usage=usage, metrics=metrics, choices=choices
        )

    def _answer_metrics(self) -> Metrics | None:
        """Measurements of the only sequence; None where there are several."""
        completion = self._choices[0].completion
        if len(self._sequences) > 1 or completion is None:
            return None
        return completion_metrics(completion, self._backend.num_draft_tokens)

    def _params(self, prompt_ids: list[int], index: int) -> SamplingParams:
        """Parameters of sequence `index` of a prompt."""
        params, limit = self._request.params.nth(index), self._request.max_tokens
        if limit is None:
            limit = min(DEFAULT_CHAT_TOKENS, self._backend.max_length - len(prompt_ids))
            params = msgspec.structs.replace(params, max_tokens=max(1, limit))
        return params
