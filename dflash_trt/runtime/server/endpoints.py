# SPDX-License-Identifier: Apache-2.0
"""Handlers of all paths, and the generation that they share."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from functools import cached_property

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from dflash_trt import __version__
from dflash_trt.api.neutral_fields import IGNORED
from dflash_trt.errors import DFlashError
from dflash_trt.runtime.server.answer.answer_logprobs import TokenTexts
from dflash_trt.runtime.server.answer.bodies import Model, ModelList, Tokens, Version
from dflash_trt.runtime.server.answer.event_stream import EventStream
from dflash_trt.runtime.server.answer.generation import Generation
from dflash_trt.runtime.server.answer.inbox import Inbox
from dflash_trt.runtime.server.answer.responses_answer import ResponseStream, whole_response
from dflash_trt.runtime.server.calls.tools import tool_format
from dflash_trt.runtime.server.client_limits import Admission
from dflash_trt.runtime.server.disconnect import cancel_on_disconnect
from dflash_trt.runtime.server.http_error import HttpError, StructResponse
from dflash_trt.runtime.server.request.body import BodyReader, decode_object
from dflash_trt.runtime.server.request.decoding import decode_fields
from dflash_trt.runtime.server.request.generation_request import (
    TOKENIZE,
    GenerationRequest,
    check_model,
    parse_request,
)
from dflash_trt.runtime.server.request.messages import read_messages
from dflash_trt.runtime.server.request.request_fields import TokenizeBody
from dflash_trt.runtime.server.request.responses_request import chat_fields
from dflash_trt.runtime.server.request.tokenizing import TokenizerPool
from dflash_trt.runtime.server.served_backend import ServedBackend, check_room
from dflash_trt.runtime.server.telemetry.prometheus import ServerMetrics
from dflash_trt.runtime.server.telemetry.tracing import Tracing

DEGRADED_FAILURES = 3
"""Sequences that fail in a row before /health reports it."""
STALLED_SECONDS = 60.0
"""Time of a step after which /health reports it; vLLM's VLLM_ENGINE_ITERATION_TIMEOUT_S has the same default."""


class Endpoints:
    """One model, served by one backend."""

    def __init__(
        self,
        backend: ServedBackend,
        model: str,
        *,
        max_waiting: int,
        max_body_bytes: int,
        max_answer_bytes: int,
        tracing: Tracing | None = None,
        target: str | None = None,
        draft: str | None = None,
    ) -> None:
        """`target` and `draft` are the names of the served models, where they are known."""
        check_room(backend)
        self.admission = Admission(backend.max_batch_size + max_waiting)
        self.answers = Admission(max_answer_bytes, field="max_tokens", unit="MiB of answers", unit_size=2**20)
        self._backend = backend
        self._model = model
        self._target, self._draft = target, draft
        self.bodies = BodyReader(max_body_bytes)
        self._tracing = tracing
        self._created = int(time.time())
        self._metrics = ServerMetrics(model, backend)
        self._tool_format = tool_format(backend.tokenizer)
        self._token_texts = TokenTexts(backend.tokenizer)
        self._tokenizers = TokenizerPool(backend.tokenizer, backend.max_length)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, is_chat=True)

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._complete(request, is_chat=True, is_response=True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return StructResponse(ModelList(data=[self._describe()]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        check_model(request.path_params["model"], self._model)
        return StructResponse(self._describe())

    def _describe(self) -> Model:
        return Model(
            id=self._model, created=self._created, root=self._target, draft_model=self._draft,
            max_model_len=self._backend.max_length, num_spec_tokens=self._backend.num_draft_tokens,
            unscaled_length=self._backend.unscaled_length,
        )  # fmt: skip

    async def health(self, request: Request) -> Response:
        """GET /health: 200, or 503 when the decoder has ended, a step does not end or request after request fails."""
        if not self._backend.is_alive:
            return Response("decoder thread has ended", 503)
        if (seconds := self._backend.step_seconds) > STALLED_SECONDS:
            return Response(f"stalled: the current step has taken {seconds:.0f} s", 503)
        if (number := self._metrics.consecutive_failures) >= DEGRADED_FAILURES:
            return Response(f"degraded: the last {number} sequences failed: {self._metrics.last_failure}", 503)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return StructResponse(Version(__version__))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: token ids of a prompt, or of messages in the chat template."""
        client = _client(request)
        async with self.bodies.read(request, client) as encoded:
            return StructResponse(await cancel_on_disconnect(request.receive, self._tokenize(encoded, client)))

    async def _tokenize(self, encoded: bytes, client: str) -> Tokens:
        body = decode_fields(decode_object(encoded), TokenizeBody, TOKENIZE)
        check_model(body.model, self._model)
        is_text = body.messages is None  # to which a chat template adds them
        if body.add_special_tokens not in (None, is_text):
            only = "true, as in a completion" if is_text else "false, as in a chat"
            raise HttpError(400, f"add_special_tokens: only {only}, is supported")
        if body.messages is not None:
            messages = read_messages(body.messages, self._tool_format)
            ids = await self._tokenizers.encode_chat(messages, num_bytes=len(encoded), client=client)
        elif body.prompt is not None:
            ids = await self._tokenizers.encode(body.prompt, client=client)
        else:
            raise HttpError(400, "prompt: either it or messages must be given")
        return Tokens(len(ids), self._backend.max_length, ids)

    async def prepare(self) -> None:
        """Reads the vocabulary for structured outputs; if that fails, requests that need it report why."""
        with suppress(DFlashError):
            await asyncio.to_thread(lambda: self._backend.grammars)

    def shut_down(self) -> None:
        """Ends all requests with 503."""
        self._backend.close()

    async def _complete(self, http_request: Request, *, is_chat: bool, is_response: bool = False) -> Response:
        client = _client(http_request)
        with ExitStack() as admission:  # waits until all sequences are computed
            span = None
            if self._tracing is not None:
                operation = "chat" if is_chat else "text_completion"
                span = admission.enter_context(self._tracing.request(operation, self._model, http_request.headers))
            async with self.bodies.read(http_request, client) as encoded:
                body = decode_object(encoded)
                if is_response:
                    body = chat_fields(body)
                request = parse_request(body, self._model, self._backend.max_length, self._tool_format, is_chat=is_chat)
                admission.enter_context(self.admission.admit(request.body.n * max(1, len(request.prompts)), client))
                prompt_ids = await cancel_on_disconnect(
                    http_request.receive, self._prepare(request, len(encoded), client)
                )
            generation = Generation(
                self._backend, self._model, self._metrics, request, prompt_ids, self._token_texts, client, span
            )
            admission.enter_context(self.answers.admit(generation.max_bytes, client))
            admission.callback(generation.cancel)
            http_request.scope["dflash_trt.log_fields"] = generation.log_fields
            headers = {}
            if request.ignored:
                generation.log_fields["ignored"] = " ".join(request.ignored)
                headers["warning"] = ", ".join(f'299 - "{name}: ignored: {IGNORED[name]}"' for name in request.ignored)
            if not request.body.stream:
                document = await cancel_on_disconnect(http_request.receive, generation.whole(self._inbox))
                return StructResponse(whole_response(document) if is_response else document, headers=headers)
            stream = EventStream(headers)
            sink = ResponseStream(stream.put, stream.end) if is_response else stream
            generation.start(self._inbox, sink.put, sink.end)
            await cancel_on_disconnect(http_request.receive, stream.begin())
            stream.hold(admission.pop_all())
            return stream

    @cached_property
    def _inbox(self) -> Inbox:
        return Inbox(asyncio.get_running_loop())

    async def _prepare(self, request: GenerationRequest, num_bytes: int, client: str) -> list[list[int]]:
        """Token ids of the prompts; compiles the grammar, RequestError for one that cannot be enforced."""
        if request.is_chat:
            tools = () if request.tools is None else request.tools.definitions
            messages, kwargs = request.messages, request.template_kwargs
            ids = [await self._tokenizers.encode_chat(messages, tools, kwargs, num_bytes=num_bytes, client=client)]
        else:
            ids = [
                await self._tokenizers.encode(prompt, client=client) if isinstance(prompt, str) else list(prompt)
                for prompt in request.prompts
            ]
        if (grammar := request.params.structured_outputs) is not None:
            grammars = await asyncio.to_thread(lambda: self._backend.grammars)
            await asyncio.wrap_future(grammars.submit(grammar))  # it is kept for the request
        return ids


def _client(request: Request) -> str:
    """The client that limits apply to: its API key, or its address."""
    return request.scope.get("dflash_trt.client") or (request.client.host if request.client else "")
