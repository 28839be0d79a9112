# SPDX-License-Identifier: Apache-2.0
"""The Python API: prompts in, completions out, many requests at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.backend import Chunk, Messages, Prompt, run
from dflash_trt.runtime.completion import Completion
from dflash_trt.runtime.embedded_backend import PendingRequest
from dflash_trt.runtime.metrics import DecoderMetrics
from dflash_trt.runtime.open_backend import open_engine
from dflash_trt.runtime.options import DEFAULTS, RuntimeOptions
from dflash_trt.runtime.prompts import is_prompt
from dflash_trt.runtime.sampling import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or for each its own."""


VLLM = {
    "model": "LLM(engine, target): an engine directory that dflash-trt build wrote, and optionally its target",
    "tensor_parallel_size": "dflash-trt generate --tp N joins ranks",
    "tokenizer": "target: its directory holds the tokenizer",
    "max_model_len": "max_tokens of SamplingParams; the target's positions are the limit",
    "quantization": "dflash-trt build --recipe quantises the draft",
    "num_speculative_tokens": "draft_length",
    "max_num_seqs": "max_batch_size",
    "gpu_memory_utilization": "cache_gib, in GiB",
    "max_num_batched_tokens": "prefill_chunk",
    "speculative_config": "the engine is the drafter; draft_length says how many tokens it drafts",
}
"""Ours, for arguments of vLLM's LLM."""


class LLM:
    """An engine directory and its target, serving requests from any thread.

    >>> with LLM("engine") as llm:
    ...     print(llm.generate("def quicksort(").text)
    """

    def __init__(
        self,
        engine: str | Path | None = None,
        target: str | Path | None = None,
        *,
        max_batch_size: int | None = DEFAULTS.max_batch_size,
        draft_length: int | str | None = DEFAULTS.draft_length,
        cache_gib: float = DEFAULTS.cache_gib,
        prefill_chunk: int = DEFAULTS.prefill_chunk,
        device: str = DEFAULTS.device,
        enable_prefix_caching: bool = DEFAULTS.enable_prefix_caching,
        dtype: str = DEFAULTS.dtype,
        **vllm: object,
    ) -> None:
        """Loads both; `target` is a directory or a repository id, by default the one that the engine was built for.

        The settings are those of `RuntimeOptions`, which says what each means; a `draft_length` of None is its default.
        Of vLLM's arguments, `model` is taken for the engine directory and a parallel size of 1 as it is; for others
        the error names ours.

        Raises EngineError, CheckpointError, RequestError and MissingDependencyError, each with what to do about it.
        """
        engine = _take_vllm(vllm, engine)
        options = RuntimeOptions(
            max_batch_size=max_batch_size,
            draft_length=DEFAULTS.draft_length if draft_length is None else draft_length,
            cache_gib=cache_gib,
            prefill_chunk=prefill_chunk,
            device=device,
            enable_prefix_caching=enable_prefix_caching,
            dtype=dtype,
        )
        for name, path in (("engine", engine), ("target", target)):
            if not isinstance(path, str | Path) and not (name == "target" and path is None):
                raise RequestError(f"{name}: expected a path or a name, found {shown(path)}")
        self.backend = open_engine(engine, None if target is None else str(target), options)

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
            return run(self.backend, [prompts], _settings(sampling_params))[0]  # type: ignore[list-item]
        return run(self.backend, prompts, _settings(sampling_params))  # type: ignore[arg-type]

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
            prompts = [self.backend.encode_chat(each) for each in messages]
            return run(self.backend, prompts, _settings(sampling_params))
        return run(self.backend, [self.backend.encode_chat(messages)], _settings(sampling_params))[0]  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Chunk]:
        """The answer step by step, from the first `next` on; closing the iterator cancels the request."""
        return _follow(PendingRequest(self.backend, prompt, _params(sampling_params), incremental=True))

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        return self.backend.stream(prompt, _params(sampling_params))


def _take_vllm(arguments: dict[str, object], engine: object) -> Any:
    """The engine directory; RequestError, with our name, for an argument of vLLM's that means nothing here."""
    if engine is None:
        engine = arguments.pop("model", None)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if arguments.get(name) == 1:
            del arguments[name]
    for name in arguments:
        hint = VLLM.get(name, "LLM(engine, target, max_batch_size=..., draft_length=..., cache_gib=..., dtype=...)")
        if name in SamplingParams.__struct_fields__:
            hint = f"{name} of SamplingParams"
        raise RequestError(f"{name}: LLM has no such argument", hint=hint)
    return engine


def _params(given: object) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, found {given!r}")
    return given or SamplingParams()


def _settings(given: Params) -> SamplingParams | list[SamplingParams]:
    return [_params(each) for each in given] if isinstance(given, list | tuple) else _params(given)


def _follow(pending: PendingRequest) -> Iterator[Chunk]:
    pending.submit()
    try:
        yield from pending.chunks()
    finally:
        pending.cancel()
