# SPDX-License-Identifier: Apache-2.0
"""The Python API: prompts in, completions out, many requests at once."""

from __future__ import annotations

import queue
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import overload

from dflash_trt.errors import RequestError, shown
from dflash_trt.kvcache.slots import DEFAULT_CACHE_GIB
from dflash_trt.runtime.backend import Chunk, Messages, Prompt
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.completion import Completion
from dflash_trt.runtime.decoder import DEFAULT_PREFILL_CHUNK
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.metrics import DecoderMetrics
from dflash_trt.runtime.prompts import is_prompt
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams, is_integer
from dflash_trt.targets.dtype import check_dtype

MAX_SIZE = 2**31 - 1
"""Slots and positions are INT32 in both graphs."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or for each its own."""


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
        max_batch_size: int | None = None,
        draft_length: int | str | None = None,
        cache_gib: float = DEFAULT_CACHE_GIB,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        device: str = "auto",
        enable_prefix_caching: bool = True,
        dtype: str = "auto",
    ) -> None:
        """Loads both; `target` is a directory or a Hugging Face repository id.

        `max_batch_size` requests run at once, in `cache_gib` GiB of caches, the others wait; by default what the
        engine's TensorRT plans hold, and 16 where it has none. `draft_length` is how many drafted tokens a step
        verifies: "auto", the default, takes what measured steps and acceptance say is fastest; a number, 0 being plain
        decoding, or "1:7,8:3" (by batch size).
        At most `prefill_chunk` prompt tokens join a step. `device` is "cpu", "cuda" or "auto": CUDA where torch sees
        it. With `enable_prefix_caching` a prompt begins with what earlier requests left in the caches of target and
        drafter. `dtype` is the type that the target is computed in: "float32", which is "auto" too, or "bfloat16", for
        a checkpoint in it, at half the memory.

        Raises EngineError, CheckpointError, RequestError and MissingDependencyError, each with what to do about it.
        """
        given = {"max_batch_size": max_batch_size, "prefill_chunk": prefill_chunk}
        for name, value in given.items():
            if value is not None and not (is_integer(value) and 1 <= value <= MAX_SIZE):
                expected = f"at most {MAX_SIZE}" if is_integer(value) and value > 0 else "at least 1"
                raise RequestError(f"{name}: expected {expected}, found {shown(value)}")
        for name, path in (("engine", engine), ("target", target)):
            if not isinstance(path, str | Path):
                raise RequestError(f"{name}: expected a path or a name, found {shown(path)}")
        check_dtype(dtype)
        pair = CheckedPair.read(Path(engine), str(target))
        length = pair.draft_length(draft_length)
        from dflash_trt.runtime.session import Session  # it loads torch: seconds

        self._session = Session.load(
            pair,
            num_slots=max_batch_size or pair.default_batch_size,
            cache_gib=cache_gib,
            device=device,
            dtype=dtype,
        )
        self.backend = EmbeddedBackend(
            self._session, length, prefill_chunk, enable_prefix_caching=enable_prefix_caching
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is left and ends the decoder's thread; so does dropping the last reference."""
        self.backend.close()

    def metrics(self) -> DecoderMetrics:
        """What the decoder does now, and has done since it was made."""
        return self.backend.metrics()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, and goes first
        self, prompts: str, sampling_params: Params = None
    ) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[int], sampling_params: Params = None) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt], sampling_params: Params = None
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Completion | list[Completion]:
        """The answer to a prompt, or the answers to a list of prompts that run together, in their order.

        A prompt is a text, or token ids in a list, a tuple or an array. Raises RequestError for a prompt that cannot
        be served, before any of them runs.
        """
        if is_prompt(prompts):
            return self._generate([prompts], sampling_params)[0]  # type: ignore[list-item]
        return self._generate(prompts, sampling_params)  # type: ignore[arg-type]

    @overload
    def chat(self, messages: Messages, sampling_params: Params = None) -> Completion: ...
    @overload
    def chat(self, messages: Sequence[Messages], sampling_params: Params = None) -> list[Completion]: ...
    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None
    ) -> Completion | list[Completion]:
        """The answer to a conversation [{"role": "user", "content": "..."}, ...], or the answers to a list of them.

        Raises RequestError where the target's tokenizer has no chat template, or it refuses the conversation.
        """
        if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
            return self._generate([self.backend.encode_chat(each) for each in messages], sampling_params)
        return self._generate([self.backend.encode_chat(messages)], sampling_params)[0]  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """The answer step by step, from the first `next` on; closing the iterator cancels the request."""
        chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        request = self.backend.request(prompt, _params(sampling_params), chunks.put)
        return self._follow(request, chunks)

    def _follow(self, request: Request, chunks: queue.SimpleQueue[Chunk | Exception]) -> Iterator[Chunk]:
        self.backend.submit(request)
        try:
            yield from _until_the_end(chunks)
        finally:
            self.backend.cancel(request)

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        return self.backend.stream(prompt, _params(sampling_params))

    def _generate(self, prompts: Sequence[Prompt], params: Params) -> list[Completion]:
        settings = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(settings) != len(prompts):
            raise RequestError(
                f"sampling_params: expected one for each of {len(prompts)} prompts, found {len(settings)}"
            )
        queues: list[queue.SimpleQueue[Chunk | Exception]] = [queue.SimpleQueue() for _ in prompts]
        requests = [
            self.backend.request(prompt, _params(setting), chunks.put, incremental=False)
            for prompt, setting, chunks in zip(prompts, settings, queues, strict=True)
        ]
        try:
            for request in requests:
                self.backend.submit(request)
            return [_whole(chunks) for chunks in queues]
        except BaseException:  # Ctrl-C while waiting, above all
            for request in requests:
                self.backend.cancel(request)
            raise


def _params(given: object) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, found {given!r}")
    return given or SamplingParams()


def _next(chunks: queue.SimpleQueue[Chunk | Exception]) -> Chunk | Exception:
    """Waits in short turns: a Ctrl-C that arrives just before a wait begins is not heard until it ends."""
    while True:
        with suppress(queue.Empty):
            return chunks.get(timeout=0.1)


def _until_the_end(chunks: queue.SimpleQueue[Chunk | Exception]) -> Iterator[Chunk]:
    while True:
        chunk = _next(chunks)
        if isinstance(chunk, Exception):
            raise chunk
        yield chunk
        if chunk.completion is not None:
            return


def _whole(chunks: queue.SimpleQueue[Chunk | Exception]) -> Completion:
    *_, last = _until_the_end(chunks)
    assert last.completion is not None
    return last.completion
