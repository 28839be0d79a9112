# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime as a backend: a session's decoder on a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dflash_trt.api.backend import Chunk, DecoderMetrics, Messages, Prompt
from dflash_trt.api.chat_template import encode, encode_chat, prompt_token_ids
from dflash_trt.api.completion import Completion, FinishReason
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import parse_draft_length
from dflash_trt.runtime.kvcache.slots import PageWatcher
from dflash_trt.runtime.logits_processors import GrammarCompiler
from dflash_trt.runtime.request import Request, completion, prompt_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.session import Session

Put = Callable[[Chunk | Exception], None]


class EmbeddedBackend:
    """Serves requests by one session, from any thread; its thread ends with the last reference to it."""

    def __init__(
        self, session: Session, options: RuntimeOptions = DEFAULTS, *, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`session` was loaded with the same options; `on_end` is the last call of the decoder's thread."""
        self.session = session
        self._decoder = session.decoder(
            parse_draft_length(options.draft_length, session.manifest.draft.num_draft_tokens),
            prefill_chunk=options.prefill_chunk,
            prefix_caching=options.enable_prefix_caching,
        )
        self._thread = DecoderThread(self._decoder, on_end)
        # The thread holds the decoder but not this object, so dropping the last reference closes it.
        self._close = weakref.finalize(self, self._thread.close)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """Answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels it."""
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
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request = self.request(prompt, params, put, incremental=incremental)
        self.submit(request)
        return partial(self.cancel, request), _until_whole(chunks)

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[PendingRequest]:
        """Requests, not yet submitted, whose caller waits for the whole answers."""
        return [PendingRequest(self, *each) for each in zip(prompts, params, strict=True)]

    def request(self, prompt: Prompt, params: SamplingParams, put: Put, *, incremental: bool = True) -> Request:
        """Request whose chunks, or the error that ended it, are `put` on the decoder's thread."""
        return self.session.request(self.encode(prompt), params, _reporter(put, incremental))

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the backend is closed or has failed."""
        self._thread.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        self._thread.cancel(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return encode(self.tokenizer, prompt, chat=False) if isinstance(prompt, str) else prompt_token_ids(prompt)

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiler that keeps recent grammars; RequestError where there can be none."""
        return self.session.grammars

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the target."""
        assert self.session.tokenizer is not None
        return self.session.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """K: draft tokens per step; the largest draft_length."""
        return self.session.manifest.draft.num_draft_tokens

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, nor after the decoder has failed."""
        return self._thread.is_open

    @property
    def error(self) -> Exception | None:
        """Exception that ended the decoder."""
        return self._thread.error

    @property
    def max_batch_size(self) -> int:
        """Requests that run at once."""
        return self.session.max_batch_size

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that fill the pages of the caches."""
        return self._decoder.slots.num_tokens

    def watch_shared_pages(self, watcher: PageWatcher) -> None:
        """Calls `watcher`, on the decoder's thread, for each page that becomes shared or is evicted from now on."""
        self._decoder.slots.index.watcher = watcher

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.session.max_length

    @property
    def unscaled_length(self) -> int | None:
        """Tokens up to which the draft's RoPE is not scaled; None where it never is."""
        scaling = self.session.manifest.draft.rope.scaling
        return None if scaling is None else scaling.original_max_position_embeddings

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation in the target's chat template."""
        return encode_chat(self.tokenizer, messages)

    def metrics(self) -> DecoderMetrics:
        """Current load of the decoder, and its totals."""
        return self._decoder.metrics()

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        self._close()


class PendingRequest:
    """A request with the queue that its chunks arrive on."""

    def __init__(
        self, backend: EmbeddedBackend, prompt: Prompt, params: SamplingParams, *, incremental: bool = False
    ) -> None:
        self._chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._backend = backend
        self.request = backend.request(prompt, params, self._chunks.put, incremental=incremental)

    def submit(self) -> None:
        """Queues the request; EngineError when the backend is closed or has failed."""
        self._backend.submit(self.request)

    def result(self) -> Completion:
        """Waits for the whole answer."""
        *_, last = self.chunks()
        assert last.completion is not None
        return last.completion

    def chunks(self) -> Iterator[Chunk]:
        """Answer in chunks as they arrive."""
        while True:
            try:
                chunk = self._chunks.get(timeout=0.1)  # in short turns, because Ctrl-C is not noticed during a wait
            except queue.Empty:
                continue
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
            if chunk.completion is not None:
                return

    def cancel(self) -> None:
        """Ends the request before the next step."""
        self._backend.cancel(self.request)


async def _until_whole(chunks: asyncio.Queue[Chunk | Exception]) -> AsyncGenerator[Chunk, None]:
    while True:
        chunk = await chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        yield chunk
        if chunk.completion is not None:
            return


def _reporter(put: Put, incremental: bool) -> Callable[[Request], None]:
    """Listener that puts what each report adds, or all of it at the end."""
    sent = sent_steps = sent_times = 0

    def on_progress(request: Request) -> None:
        nonlocal sent, sent_steps, sent_times
        if not incremental and request.finished is None:
            return
        new = slice(sent, len(request.token_ids))
        steps, emitted = request.steps[sent_steps:], request.emitted[sent_times:]
        text = "" if request.text is None else request.text.next_text()
        try:
            chunk = Chunk(
                text=text,
                token_ids=request.token_ids[new],
                logprobs=request.logprobs[new] if request.params.logprobs else None,
                top_logprobs=request.top_logprobs[new] if request.params.top_logprobs else None,
                prompt_logprobs=prompt_logprobs(request) if sent == 0 else None,
                steps=steps,
                emitted=emitted,
                completion=None if request.finished is None else completion(request),
            )
        except (EngineError, RequestError) as error:
            put(error)
        else:
            put(chunk)
        sent, sent_steps, sent_times = new.stop, sent_steps + len(steps), sent_times + len(emitted)

    return on_progress


Command = tuple[Callable[[Request], None], Request]


class DecoderThread:
    """Steps its decoder while there are requests, and sleeps while there are none."""

    def __init__(self, decoder: Decoder, on_end: Callable[[], None]) -> None:
        self._decoder = decoder
        self._on_end = on_end
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self.is_open = True
        """Whether it takes requests."""
        self.error: Exception | None = None
        """Exception that ended it."""
        self._thread = threading.Thread(target=self._run, name="dflash-trt decoder", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the thread has ended or failed."""
        self._send(self._decoder.add, request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        if request.finished is None:
            with suppress(EngineError):  # an ending thread ends all its requests
                self._send(self._decoder.cancel, request)

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        with self._changed:
            self.is_open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # dropped with the last reference to a report
            self._thread.join()

    def _send(self, command: Callable[[Request], None], request: Request) -> None:
        with self._changed:
            if not self.is_open:
                raise EngineError("expected an open LLM, found a closed one") from self.error
            self._commands.append((command, request))
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._execute():
                self._decoder.step()
        except Exception as error:  # any: waiting callers must get it
            self.error = error
        with self._changed:
            self.is_open = False
        self._end_all()
        self._decoder.close()
        self._on_end()

    def _execute(self) -> bool:
        """Executes queued commands, waiting for one if the decoder is idle; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or not self.is_open or not self._decoder.is_idle)
            commands, is_open = list(self._commands), self.is_open
        for command, request in commands:
            command(request)
            self._commands.popleft()  # afterwards, so that `_end_all` sees the commands after a failing one
        return is_open

    def _end_all(self) -> None:
        """Ends all remaining requests, so that no caller waits for ever."""
        left = [*self._decoder.running.values(), *self._decoder.waiting, *(request for _, request in self._commands)]
        for request in left:
            if request.finished is None:
                request.error = self.error
                request.finish(FinishReason.CANCELLED)
                request.report()
