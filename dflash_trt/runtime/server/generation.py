# SPDX-License-Identifier: Apache-2.0
"""Decodes the sequences of one completion request and makes its response, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from dflash_trt.api.backend import Chunk, ServedBackend
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, SamplingParams
from dflash_trt.errors import EngineError
from dflash_trt.runtime.server.http_error import shutting_down
from dflash_trt.runtime.server.openai_logprobs import TokenTexts
from dflash_trt.runtime.server.prometheus import ServerMetrics
from dflash_trt.runtime.server.requests import CompletionRequest
from dflash_trt.runtime.server.responses import Choice, Envelope, Json, has_content, usage
from dflash_trt.runtime.server.streaming import merge_streams
from dflash_trt.runtime.server.tracing import RequestSpan


class Generation:
    """All sequences of one request, decoded together."""

    def __init__(
        self,
        backend: ServedBackend,
        model: str,
        metrics: ServerMetrics,
        request: CompletionRequest,
        prompt_ids: list[list[int]],
        token_texts: TokenTexts,
        span: RequestSpan | None = None,
    ) -> None:
        self.log_fields: dict[str, object] = {"prompt_tokens": sum(map(len, prompt_ids)), "output_tokens": 0}
        """Fields for the access log."""
        self._backend = backend
        self._metrics = metrics
        self._request = request
        self._envelope = Envelope(request, model, backend.num_draft_tokens)
        self._sequences = [(ids, self._params(ids, index)) for ids in prompt_ids for index in range(request.n)]
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

    async def response(self) -> Json:
        """The document of a request without `stream`."""
        choices: list[Json] = [{}] * len(self._sequences)
        async with aclosing(self._chunks(incremental=False)) as chunks:
            async for choice, chunk in chunks:
                choices[choice.index] = choice.add(chunk, is_delta=False)
        return self._envelope.wrap(choices, **self._summary())

    async def events(self) -> AsyncGenerator[Json, None]:
        """The documents of a streamed response; the last one has usage or metrics."""
        has_usage = self._request.include_usage
        extra: Json = {"usage": None} if has_usage else {}
        async with aclosing(self._chunks(incremental=True)) as chunks:
            async for choice, chunk in chunks:
                delta = choice.add(chunk, is_delta=True)
                if not has_usage and all(each.completion is not None for each in self._choices):
                    extra = {"metrics": self._envelope.metrics(self._choices)}
                if has_content(delta):
                    yield self._envelope.wrap([delta], **extra)
        if has_usage:
            yield self._envelope.wrap([], **self._summary())

    async def _chunks(self, *, incremental: bool) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        streams = [self._backend.stream(ids, params, incremental=incremental) for ids, params in self._sequences]
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

    def _summary(self) -> Json:
        counts = usage(self._num_prompt_tokens, self._choices)
        return {"usage": counts, "metrics": self._envelope.metrics(self._choices)}

    def _params(self, prompt_ids: list[int], index: int) -> SamplingParams:
        """Parameters of sequence `index` of a prompt."""
        params, limit = self._request.params, self._request.max_tokens
        if limit is None:
            limit = min(DEFAULT_CHAT_TOKENS, self._backend.max_length - len(prompt_ids))
        return msgspec.structs.replace(params.nth(index), max_tokens=max(1, limit))
