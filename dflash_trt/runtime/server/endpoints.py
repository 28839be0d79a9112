# SPDX-License-Identifier: Apache-2.0
"""Handlers of all paths, and the generation that they share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_trt import __version__
from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.api.neutral_fields import IGNORED
from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, SamplingParams
from dflash_trt.errors import DFlashError, EngineError
from dflash_trt.runtime.server.grammars import GrammarProcesses
from dflash_trt.runtime.server.http_error import HttpError, shutting_down
from dflash_trt.runtime.server.limits import Admission, BodyReader, decode_object
from dflash_trt.runtime.server.prometheus import ServerMetrics
from dflash_trt.runtime.server.requests import CompletionRequest, parse_request, read_messages
from dflash_trt.runtime.server.responses import Choice, Envelope, Json, TokenTexts, has_content, usage
from dflash_trt.runtime.server.served_backend import ServedBackend, check_room
from dflash_trt.runtime.server.streaming import EventStream, cancel_on_disconnect, merge_streams
from dflash_trt.runtime.server.tokenizing import TokenizerPool
from dflash_trt.runtime.server.tools import tool_format
from dflash_trt.runtime.server.tracing import RequestSpan, Tracing


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
                if self._request.continuous_usage:
                    extra["usage"] = usage(len(self._sequences[choice.index][0]), [choice])
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


DEGRADED_FAILURES = 3
"""Sequences that fail in a row before /health reports it."""
TOKENIZE_FIELDS = {"model", "prompt", "messages", "add_special_tokens"}


class Endpoints:
    """One model, served by one backend."""

    def __init__(
        self,
        backend: ServedBackend,
        model: str,
        *,
        max_waiting: int,
        max_body_bytes: int,
        tracing: Tracing | None = None,
        target: str | None = None,
        draft: str | None = None,
    ) -> None:
        """`target` and `draft` are the names of the served models, where they are known."""
        check_room(backend)
        self.admission = Admission(backend.max_batch_size + max_waiting)
        self._backend = backend
        self._model = model
        self._target, self._draft = target, draft
        self.bodies = BodyReader(max_body_bytes)
        self._tracing = tracing
        self._created = int(time.time())
        self._metrics = ServerMetrics(model, backend)
        self.grammars = GrammarProcesses(lambda: backend.grammars)
        self._tool_format = tool_format(backend.tokenizer)
        self._token_texts = TokenTexts(backend.tokenizer)
        self._tokenizers = TokenizerPool(backend.tokenizer, backend.max_length)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, is_chat=True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = {
            "id": self._model, "object": "model", "created": self._created, "owned_by": "dflash-trt",
            "root": self._target, "draft_model": self._draft,
            "max_model_len": self._backend.max_length, "num_spec_tokens": self._backend.num_draft_tokens,
            "unscaled_length": self._backend.unscaled_length,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """GET /health: 200, or 503 when the decoder thread has ended or request after request fails."""
        if not self._backend.is_alive:
            return Response("decoder thread has ended", 503)
        if (number := self._metrics.consecutive_failures) >= DEGRADED_FAILURES:
            return Response(f"degraded: the last {number} sequences failed: {self._metrics.last_failure}", 503)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: token ids of a prompt, or of messages in the chat template."""
        client = _client(request)
        async with self.bodies.read(request, client) as encoded:
            return JSONResponse(await cancel_on_disconnect(request.receive, self._tokenize(encoded)))

    async def _tokenize(self, encoded: bytes) -> Json:
        body = decode_object(encoded)
        if unknown := sorted(body.keys() - TOKENIZE_FIELDS):
            raise HttpError(400, f"{unknown[0]}: unknown field")
        is_text = "messages" not in body  # to which a chat template adds them
        if body.get("add_special_tokens", is_text) is not is_text:
            expected = "true, as in a completion" if is_text else "false, as in a chat"
            raise HttpError(400, f"add_special_tokens: expected {expected}, found another value")
        if "messages" in body:
            messages = read_messages(body["messages"])
            ids = await self._tokenizers.encode_chat(messages, num_bytes=len(encoded))
        elif isinstance(prompt := body.get("prompt"), str):
            ids = await self._tokenizers.encode(prompt)
        else:
            raise HttpError(400, f"prompt: expected a text, found {type(prompt).__name__}")
        return {"count": len(ids), "max_model_len": self._backend.max_length, "tokens": ids}

    async def prepare(self) -> None:
        """Starts what structured outputs need; if that fails, requests that need it report why."""
        with suppress(DFlashError):
            await self.grammars.prepare()

    def shut_down(self) -> None:
        """Ends all requests with 503."""
        self.grammars.close()
        self._backend.close()

    async def _complete(self, http_request: Request, *, is_chat: bool) -> Response:
        client = _client(http_request)
        with ExitStack() as admission:  # waits until all sequences are computed
            span = None
            if self._tracing is not None:
                operation = "chat" if is_chat else "text_completion"
                span = admission.enter_context(self._tracing.request(operation, self._model, http_request.headers))
            async with self.bodies.read(http_request, client) as encoded:
                body = decode_object(encoded)
                request = parse_request(body, self._model, self._backend.max_length, self._tool_format, is_chat=is_chat)
                admission.enter_context(self.admission.admit(request.n * max(1, len(request.prompts)), client))
                prompt_ids = await cancel_on_disconnect(http_request.receive, self._prompt_ids(request, len(encoded)))
            if (grammar := request.params.structured_outputs) is not None:
                compiled = await cancel_on_disconnect(http_request.receive, self.grammars.compile(grammar, client))
                http_request.scope["dflash_trt.grammar"] = compiled  # in use, so not compiled again
            generation = Generation(
                self._backend, self._model, self._metrics, request, prompt_ids, self._token_texts, span
            )
            http_request.scope["dflash_trt.log_fields"] = generation.log_fields
            headers = {}
            if request.ignored:
                generation.log_fields["ignored"] = " ".join(request.ignored)
                headers["warning"] = ", ".join(f'299 - "{name}: ignored: {IGNORED[name]}"' for name in request.ignored)
            if not request.stream:
                document = await cancel_on_disconnect(http_request.receive, generation.response())
                return MsgspecResponse(document, headers=headers)
            events = generation.events()
            try:  # before the headers are sent, so that an error has its status
                first = await cancel_on_disconnect(http_request.receive, _next(events))
            except BaseException:
                await events.aclose()
                raise
            return EventStream(_prepend(first, events, admission.pop_all()), headers)

    async def _prompt_ids(self, request: CompletionRequest, num_bytes: int) -> list[list[int]]:
        if request.is_chat:
            tools = () if request.tools is None else request.tools.definitions
            messages, kwargs = request.messages, request.template_kwargs
            return [await self._tokenizers.encode_chat(messages, tools, kwargs, num_bytes=num_bytes)]
        return [
            await self._tokenizers.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in request.prompts
        ]


class MsgspecResponse(Response):
    """Response with a JSON document."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encodes the document."""
        return msgspec.json.encode(content)


def _client(request: Request) -> str:
    """The client that limits apply to: its API key, or its address."""
    return request.scope.get("dflash_trt.client") or (request.client.host if request.client else "")


async def _prepend(first: Json, events: AsyncGenerator[Json, None], admission: ExitStack) -> AsyncGenerator[Json, None]:
    with admission:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event


async def _next(events: AsyncGenerator[Json, None]) -> Json:
    return await anext(events)
