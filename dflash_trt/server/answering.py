# SPDX-License-Identifier: Apache-2.0
"""A question's answers in the making: whole, or as they grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from dflash_trt.runtime.backend import Chunk
from dflash_trt.runtime.completion import Completion
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.server.answers import Choice, Envelope, Json, has_news, usage
from dflash_trt.server.http_refusal import Refusal
from dflash_trt.server.listener import merged
from dflash_trt.server.prometheus import ServerMetrics
from dflash_trt.server.questions import DEFAULT_CHAT_TOKENS, Question


class Answering:
    """All answers to one question, which run at once."""

    def __init__(
        self,
        backend: EmbeddedBackend,
        model: str,
        metrics: ServerMetrics,
        question: Question,
        prompt_ids: list[list[int]],
    ) -> None:
        self.note: dict[str, object] = {"prompt_tokens": sum(map(len, prompt_ids)), "output_tokens": 0}
        """For the log."""
        self._backend = backend
        self._metrics = metrics
        self._question = question
        self._envelope = Envelope(question, model, backend.num_draft_tokens)
        self._jobs = [(ids, self._params(ids, number)) for ids in prompt_ids for number in range(question.n)]
        self._num_prompt_tokens = sum(map(len, prompt_ids))
        self._choices = [Choice(index, question, backend.tokenizer) for index in range(len(self._jobs))]
        self._last: list[float | None] = [None] * len(self._jobs)

    async def whole(self) -> Json:
        """The answer to a request that is not streamed."""
        choices: list[Json] = [{}] * len(self._jobs)
        async with aclosing(self._chunks(incremental=False)) as chunks:
            async for choice, chunk in chunks:
                choices[choice.index] = choice.add(chunk, whole=True)
        return self._envelope.wrap(choices, **self._summary())

    async def parts(self) -> AsyncGenerator[Json, None]:
        """The answer as it grows; its last part says what it cost."""
        has_usage = self._question.include_usage
        more: Json = {"usage": None} if has_usage else {}
        async with aclosing(self._chunks(incremental=True)) as chunks:
            async for choice, chunk in chunks:
                part = choice.add(chunk, whole=False)
                if not has_usage and all(each.completion is not None for each in self._choices):
                    more = {"metrics": self._envelope.metrics(self._choices)}
                if has_news(part):
                    yield self._envelope.wrap([part], **more)
        if has_usage:
            yield self._envelope.wrap([], **self._summary())

    async def _chunks(self, *, incremental: bool) -> AsyncGenerator[tuple[Choice, Chunk], None]:
        streams = [self._backend.stream(ids, params, incremental=incremental) for ids, params in self._jobs]
        async with aclosing(merged(streams)) as chunks:
            async for index, chunk in chunks:
                self._last[index] = self._metrics.observe_chunk(chunk, self._last[index])
                if chunk.completion is not None:
                    self._end(index, chunk.completion)
                yield self._choices[index], chunk

    def _end(self, index: int, answer: Completion) -> None:
        self._metrics.observe_answer(len(self._jobs[index][0]), answer)
        if answer.finish_reason == "cancelled":
            raise Refusal(503, "the server is shutting down")
        self.note["output_tokens"] = int(str(self.note["output_tokens"])) + len(answer.token_ids)
        if len(self._jobs) == 1 and answer.tau is not None:
            self.note["tau"] = f"{answer.tau:.2f}"

    def _summary(self) -> Json:
        counts = usage(self._num_prompt_tokens, self._choices)
        return {"usage": counts, "metrics": self._envelope.metrics(self._choices)}

    def _params(self, prompt_ids: list[int], number: int) -> SamplingParams:
        """Of answer `number` of a prompt: with a seed, each draws with its own, as in vLLM."""
        params, limit = self._question.params, self._question.max_tokens
        if limit is None:
            limit = max(1, min(DEFAULT_CHAT_TOKENS, self._backend.max_length - len(prompt_ids)))
        seed = params.seed if params.seed is None else (params.seed + number) % 2**64
        return msgspec.structs.replace(params, max_tokens=limit, seed=seed)
