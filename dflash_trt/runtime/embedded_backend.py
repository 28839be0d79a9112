# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime as a backend: a session's decoder on a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dflash_trt.api.backend import Chunk, DecoderMetrics, Prompt
from dflash_trt.api.chat_template import encode, prompt_token_ids
from dflash_trt.api.completion import Completion
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.answer import Put, chunk_reporter
from dflash_trt.runtime.decoder_thread import DecoderThread
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from dflash_trt.runtime.kvcache.prefix_index import PageWatcher
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length
from dflash_trt.runtime.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.session import Session


class EmbeddedBackend:
    """Serves requests by one session, from any thread; its thread ends with the last reference to it."""

    def __init__(
        self, session: Session, options: RuntimeOptions = DEFAULTS, *, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`session` was loaded with the same options; `on_end` is the last call of the decoder's thread."""
        self.session = session
        self.decoder = session.decoder(
            parse_draft_length(options.draft_length, session.manifest.draft.num_draft_tokens),
            prefill_chunk=options.prefill_chunk,
            prefix_caching=options.enable_prefix_caching,
        )
        self._thread = DecoderThread(self.decoder, on_end)
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

    def follow(self, prompt: Prompt, params: SamplingParams) -> Generator[Chunk]:
        """Answer step by step, from the first `next` on; closing the iterator cancels it.

        Raises RequestError for an invalid request at once.
        """
        return _follow(PendingRequest(self, prompt, params, incremental=True))

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[PendingRequest]:
        """Requests, not yet submitted, whose caller waits for the whole answers."""
        return [PendingRequest(self, *each) for each in zip(prompts, params, strict=True)]

    def request(self, prompt: Prompt, params: SamplingParams, put: Put, *, incremental: bool = True) -> Request:
        """Request whose chunks, or the error that ended it, are `put` on the decoder's thread."""
        return self.session.request(self.encode(prompt), params, chunk_reporter(put, incremental))

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the backend is closed or has failed."""
        self._thread.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        self._thread.cancel(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt_token_ids(prompt)

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiler over the target's vocabulary; RequestError where there can be none."""
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
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 while no request runs."""
        return self._thread.step_seconds

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
        return self.decoder.slots.num_tokens

    def watch_shared_pages(self, watcher: PageWatcher) -> None:
        """Calls `watcher`, on the decoder's thread, for each page that becomes shared or is evicted from now on."""
        self.decoder.slots.index.watcher = watcher

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.session.max_length

    @property
    def unscaled_length(self) -> int | None:
        """Tokens up to which the draft's RoPE is not scaled; None where it never is."""
        scaling = self.session.manifest.draft.rope.scaling
        return None if scaling is None else scaling.original_max_position_embeddings

    def metrics(self) -> DecoderMetrics:
        """Current load of the decoder, and its totals."""
        return self.decoder.metrics()

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


def _follow(pending: PendingRequest) -> Generator[Chunk]:
    pending.submit()
    try:
        yield from pending.chunks()
    finally:
        pending.cancel()
