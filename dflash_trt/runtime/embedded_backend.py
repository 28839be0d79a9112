# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime as a backend: a session's decoder on a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dflash_trt.api.backend import Chunk, Messages, PageWatcher, Prompt
from dflash_trt.api.completion import Completion, FinishReason
from dflash_trt.api.metrics import DecoderMetrics
from dflash_trt.api.prompts import prompt_token_ids
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.decoder_thread import DecoderThread
from dflash_trt.runtime.draft_length import parse_draft_length
from dflash_trt.runtime.finished_request import completion, prompt_logprobs
from dflash_trt.runtime.guided_decoding import GrammarCompiler
from dflash_trt.runtime.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.session import Session

Put = Callable[[Chunk | Exception], None]


class EmbeddedBackend:
    """Serves requests by one session, from any thread; its thread ends with the last reference to it."""

    def __init__(self, session: Session, options: RuntimeOptions = DEFAULTS) -> None:
        """`session` was loaded with the same options."""
        self.session = session
        self._decoder = session.decoder(
            parse_draft_length(options.draft_length, session.manifest.draft.num_draft_tokens),
            prefill_chunk=options.prefill_chunk,
            prefix_caching=options.enable_prefix_caching,
        )
        self._thread = DecoderThread(self._decoder)
        # The thread holds the decoder, but not this object: whoever drops it closes it.
        self._close = weakref.finalize(self, self._thread.close)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        cancel, chunks = self.start(prompt, params, incremental=incremental)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            cancel()

    def start(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> tuple[Callable[[], None], AsyncGenerator[Chunk, None]]:
        """Submits a request: what cancels it, and its chunks, on the running event loop."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def put(chunk: Chunk | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request = self.request(prompt, params, put, incremental=incremental)
        self.submit(request)
        return partial(self.cancel, request), _until_whole(chunks)

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[PendingRequest]:
        """Requests whose caller waits for the last of them, not submitted yet."""
        return [PendingRequest(self, *asked) for asked in zip(prompts, params, strict=True)]

    def request(self, prompt: Prompt, params: SamplingParams, put: Put, *, incremental: bool = True) -> Request:
        """A request whose chunks, or the error that ended it, are `put` on the decoder's thread."""
        return self.session.request(self.encode(prompt), params, _reporter(put, incremental))

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the backend is closed or has failed."""
        self._thread.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        self._thread.cancel(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return self.session.encode(prompt) if isinstance(prompt, str) else prompt_token_ids(prompt)

    @property
    def grammars(self) -> GrammarCompiler:
        """A request begins at once while its grammar is kept here; RequestError where there can be none."""
        return self.session.grammars

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        assert self.session.tokenizer is not None
        return self.session.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """What the drafter proposes in a step, and more than which none is verified."""
        return self.session.manifest.draft.num_draft_tokens

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, nor after an error of the decoder's."""
        return self._thread.is_open

    @property
    def error(self) -> Exception | None:
        """What ended the decoder."""
        return self._thread.error

    @property
    def num_slots(self) -> int:
        """Requests that run at once."""
        return self.session.num_slots

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that fill the pages of the caches."""
        return self._decoder.slots.num_tokens

    def watch_shared_pages(self, watcher: PageWatcher) -> None:
        """Calls `watcher`, on the decoder's thread, for each page that is shared from now on, or no more."""
        self._decoder.slots.index.watcher = watcher

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.session.max_length

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation in the target's chat template."""
        return self.session.encode_chat(messages)

    def metrics(self) -> DecoderMetrics:
        """What the decoder does now, and has done since it was made."""
        return self._decoder.metrics()

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        self._close()


class PendingRequest:
    """A request with the queue that its chunks come through."""

    def __init__(
        self, backend: EmbeddedBackend, prompt: Prompt, params: SamplingParams, *, incremental: bool = False
    ) -> None:
        self._chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._backend = backend
        self.request = backend.request(prompt, params, self._chunks.put, incremental=incremental)

    def submit(self) -> None:
        """Queues it; EngineError when the backend is closed or has failed."""
        self._backend.submit(self.request)

    def result(self) -> Completion:
        """The whole answer."""
        *_, last = self.chunks()
        assert last.completion is not None
        return last.completion

    def chunks(self) -> Iterator[Chunk]:
        """The answer as it comes, to its end."""
        while True:
            chunk = self._next()
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
            if chunk.completion is not None:
                return

    def cancel(self) -> None:
        """Ends the request before the next step."""
        self._backend.cancel(self.request)

    def _next(self) -> Chunk | Exception:
        """Waits in short turns: a Ctrl-C that arrives just before a wait begins is not heard until it ends."""
        while True:
            with suppress(queue.Empty):
                return self._chunks.get(timeout=0.1)


def answer(request: Request) -> Completion:
    """The answer of a request that has ended; EngineError where it, or the decoder, failed."""
    if request.error is not None and request.finished is not FinishReason.ERROR:
        raise EngineError(f"the decoder has failed: {request.error}") from request.error
    return completion(request)


async def _until_whole(chunks: asyncio.Queue[Chunk | Exception]) -> AsyncGenerator[Chunk, None]:
    while True:
        chunk = await chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        yield chunk
        if chunk.completion is not None:
            return


def _reporter(put: Put, incremental: bool) -> Callable[[Request], None]:
    """A listener that puts what each report adds, or all of it at the end."""
    sent = sent_steps = sent_times = 0

    def on_progress(request: Request) -> None:
        nonlocal sent, sent_steps, sent_times
        if not incremental and request.finished is None:
            return
        token_ids = request.token_ids[sent:]
        logprobs = request.logprobs[sent:] if request.params.logprobs else None
        top_logprobs = request.top_logprobs[sent:] if request.params.top_logprobs else None
        is_first = sent == 0
        sent += len(token_ids)
        steps, emitted = request.steps[sent_steps:], request.emitted[sent_times:]
        sent_steps += len(steps)
        sent_times += len(emitted)
        text = "" if request.text is None else request.text.next_text()
        try:
            whole = None if request.finished is None else answer(request)
        except (EngineError, RequestError) as error:
            put(error)
        else:
            put(
                Chunk(
                    text=text,
                    token_ids=token_ids,
                    logprobs=logprobs,
                    top_logprobs=top_logprobs,
                    prompt_logprobs=prompt_logprobs(request) if is_first else None,
                    steps=steps,
                    emitted=emitted,
                    completion=whole,
                )
            )

    return on_progress
