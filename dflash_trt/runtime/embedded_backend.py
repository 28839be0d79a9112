# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime as a backend: a session's decoder on a thread of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_trt.errors import EngineError
from dflash_trt.runtime.backend import Chunk, Messages, Prompt
from dflash_trt.runtime.completion import Completion, completion
from dflash_trt.runtime.decoder import DEFAULT_PREFILL_CHUNK
from dflash_trt.runtime.decoder_thread import DecoderThread
from dflash_trt.runtime.draft_length import DraftLength
from dflash_trt.runtime.metrics import DecoderMetrics
from dflash_trt.runtime.prompts import prompt_token_ids
from dflash_trt.runtime.request import FinishReason, Request
from dflash_trt.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.session import Session

Put = Callable[[Chunk | Exception], None]


class EmbeddedBackend:
    """Serves requests by one session, from any thread; its thread ends with the last reference to it."""

    def __init__(
        self,
        session: Session,
        draft_length: DraftLength | None = None,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`draft_length` is how much of a block is verified, by default all of it."""
        self._session = session
        self._decoder = session.decoder(draft_length, prefill_chunk=prefill_chunk, prefix_caching=enable_prefix_caching)
        self._thread = DecoderThread(self._decoder)
        # The thread holds the decoder, but not this object: whoever drops it closes it.
        self._close = weakref.finalize(self, self._thread.close)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def put(chunk: Chunk | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request = self.request(prompt, params, put, incremental=incremental)
        self.submit(request)
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self.cancel(request)

    def request(self, prompt: Prompt, params: SamplingParams, put: Put, *, incremental: bool = True) -> Request:
        """A request whose chunks, or the error that ended it, are `put` on the decoder's thread."""
        return self._session.request(self.encode(prompt), params, _reporter(put, incremental))

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the backend is closed or has failed."""
        self._thread.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        self._thread.cancel(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        return self._session.encode(prompt) if isinstance(prompt, str) else prompt_token_ids(prompt)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        assert self._session.tokenizer is not None
        return self._session.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """What the drafter proposes in a step, and more than which none is verified."""
        return self._session.manifest.draft.num_draft_tokens

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, nor after an error of the decoder's."""
        return self._thread.is_open

    @property
    def num_slots(self) -> int:
        """Requests that run at once."""
        return self._session.num_slots

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._session.max_length

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation in the target's chat template."""
        return self._session.encode_chat(messages)

    def metrics(self) -> DecoderMetrics:
        """What the decoder does now, and has done since it was made."""
        return self._decoder.metrics()

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        self._close()


def answer(request: Request) -> Completion:
    """The answer of a request that has ended; EngineError where it, or the decoder, failed."""
    if request.error is not None and request.finished is not FinishReason.ERROR:
        raise EngineError(f"the decoder has failed: {request.error}") from request.error
    return completion(request)


def _reporter(put: Put, incremental: bool) -> Callable[[Request], None]:
    """A listener that puts what each report adds, or all of it at the end."""
    sent = sent_steps = sent_times = 0

    def on_progress(request: Request) -> None:
        nonlocal sent, sent_steps, sent_times
        if not incremental and request.finished is None:
            return
        token_ids = request.token_ids[sent:]
        logprobs = request.logprobs[sent:] if request.params.logprobs else None
        sent += len(token_ids)
        steps, emitted = request.steps[sent_steps:], request.emitted[sent_times:]
        sent_steps += len(steps)
        sent_times += len(emitted)
        text = "" if request.text is None else request.text.next_text()
        try:
            whole = None if request.finished is None else answer(request)
        except EngineError as error:
            put(error)
        else:
            put(
                Chunk(text=text, token_ids=token_ids, logprobs=logprobs, steps=steps, emitted=emitted, completion=whole)
            )

    return on_progress
