# SPDX-License-Identifier: Apache-2.0
"""The Python API: text in, text out, many requests at once."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.completion import Completion, completion
from dflash_trt.runtime.decoder import DEFAULT_PREFILL_CHUNK
from dflash_trt.runtime.decoder_thread import DecoderThread
from dflash_trt.runtime.draft_length import parse_draft_length
from dflash_trt.runtime.metrics import DecoderMetrics
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.session import DEFAULT_CACHE_GIB, Session

Prompt = str | Sequence[int]
"""Text, taken as it is, or token ids."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to an answer."""

    text: str
    """New text; what may be the beginning of a stop text or of a character is held back."""
    token_ids: list[int]
    completion: Completion | None
    """The whole answer, on the last chunk."""


class LLM:
    """An engine directory and its target, serving requests from any thread.

    >>> with LLM("engine", "openai/gpt-oss-120b") as llm:
    ...     print(llm.generate("def quicksort(").text)
    """

    def __init__(
        self,
        engine: str | Path,
        target: str | Path,
        *,
        max_batch_size: int = 16,
        draft_length: str | None = None,
        cache_gib: float = DEFAULT_CACHE_GIB,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        device: str = "auto",
    ) -> None:
        """Loads both; `target` is a directory or a Hugging Face repository id.

        `max_batch_size` requests run at once, in `cache_gib` GiB of caches; the others wait. `draft_length` is how many
        drafted tokens a step verifies: a number, "1:7,8:3" (by batch size) or "adaptive"; by default all of them. At
        most `prefill_chunk` prompt tokens join a step. `device` is "cpu", "cuda" or "auto": CUDA where torch sees it.

        Raises EngineError, CheckpointError, RequestError and MissingDependencyError, each with what to do about it.
        """
        for name, value in (("max_batch_size", max_batch_size), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise RequestError(f"{name}: expected at least 1, found {value}")
        self._session = Session.open(
            Path(engine), str(target), num_slots=max_batch_size, cache_gib=cache_gib, device=device
        )
        num_draft_tokens = self._session.manifest.draft.num_draft_tokens
        length = parse_draft_length(draft_length or str(num_draft_tokens), num_draft_tokens)
        self._decoder = self._session.decoder(length, prefill_chunk=prefill_chunk)
        self._engine = DecoderThread(self._decoder)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is left and ends the engine's thread."""
        self._engine.close()

    def metrics(self) -> DecoderMetrics:
        """What the engine does now, and has done since it was made."""
        return self._decoder.metrics()

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """The answer to one prompt. Raises RequestError for a prompt that cannot be served."""
        return self.generate_all([prompt], params)[0]

    def generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """The answers to prompts that run together, in their order; `params` for all, or for each its own."""
        settings = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        if len(settings) != len(prompts):
            raise RequestError(f"params: expected one for each of {len(prompts)} prompts, found {len(settings)}")
        all_done = threading.Semaphore(0)

        def on_progress(request: Request) -> None:
            if request.finished is not None:
                all_done.release()

        requests = [self._request(*pair, on_progress) for pair in zip(prompts, settings, strict=True)]
        try:
            for request in requests:
                self._engine.submit(request)
            for _ in requests:
                all_done.acquire()
        except BaseException:  # Ctrl-C while waiting, above all
            for request in requests:
                self._engine.cancel(request)
            raise
        return [_answer(request) for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """The answer step by step, from the first `next` on; closing the iterator cancels the request."""
        chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        return self._follow(self._request(prompt, params or SamplingParams(), _chunks(chunks.put)), chunks)

    def _follow(self, request: Request, chunks: queue.SimpleQueue[Chunk | Exception]) -> Iterator[Chunk]:
        self._engine.submit(request)
        try:
            while True:
                chunk = chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self._engine.cancel(request)

    async def stream_async(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def put(chunk: Chunk | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request = self._request(prompt, params or SamplingParams(), _chunks(put))
        self._engine.submit(request)
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self._engine.cancel(request)

    def _request(self, prompt: Prompt, params: SamplingParams, on_progress: Callable[[Request], None]) -> Request:
        prompt_ids = self._session.encode(prompt) if isinstance(prompt, str) else prompt
        return self._session.request(prompt_ids, params, on_progress)


def _chunks(put: Callable[[Chunk | Exception], None]) -> Callable[[Request], None]:
    """A listener that puts what each report adds."""
    sent = 0

    def on_progress(request: Request) -> None:
        nonlocal sent
        token_ids = request.token_ids[sent:]
        sent += len(token_ids)
        text = "" if request.text is None else request.text.next_text()
        try:
            whole = None if request.finished is None else _answer(request)
        except EngineError as error:
            put(error)
        else:
            put(Chunk(text=text, token_ids=token_ids, completion=whole))

    return on_progress


def _answer(request: Request) -> Completion:
    if request.error is not None:
        raise EngineError(f"the decoder has failed: {request.error}") from request.error
    return completion(request)
