# SPDX-License-Identifier: Apache-2.0
"""What every runtime offers to those who serve people: the command line, Triton, an HTTP server. Loads no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from dflash_trt.api.acceptance import Step
from dflash_trt.api.completion import Completion, PromptLogprobs
from dflash_trt.api.metrics import DecoderMetrics
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError

Prompt = str | Sequence[int]
"""Text, taken as it is, or token ids."""
Messages = Sequence[dict[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to an answer."""

    text: str
    """New text; what may be the beginning of a stop text or of a character is held back."""
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Of each of them, where they were asked for and the runtime knows them as they come."""
    top_logprobs: list[dict[int, float]] | None = None
    """Of the most likely tokens in the place of each, where they were asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """On the first chunk, where they were asked for."""
    steps: list[Step] = []
    """The verify passes that brought them, after the prefill's token; empty where the runtime does not know."""
    emitted: list[float] = []
    """When the prefill's token and each pass's came, on the clock of time.perf_counter."""
    completion: Completion | None
    """The whole answer, on the last chunk."""


class PendingAnswer(Protocol):
    """A request whose whole answer is waited for."""

    def submit(self) -> None:
        """Queues it."""

    def result(self) -> Completion:
        """Waits for the answer."""

    def cancel(self) -> None:
        """Ends it; what was not submitted, or has ended, stays as it is."""


class Backend(Protocol):
    """A runtime that answers many requests at once."""

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Sequence[PendingAnswer]:
        """A request for each prompt, not submitted yet; RequestError for the first that cannot be served."""

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it grows, in one chunk where it need not be `incremental`; closing the iterator cancels it.

        The request is submitted at the first `anext`. Raises RequestError for what cannot be served.
        """

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation as a prompt; RequestError where it is none, or the target has no chat template."""

    def metrics(self) -> DecoderMetrics | None:
        """What the runtime does and has done; None where it has a page of its own for that."""

    def close(self) -> None:
        """Cancels what is left and ends the runtime."""


def run(
    backend: Backend,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    advance: Callable[[], object] = lambda: None,
) -> list[Completion]:
    """The answers to prompts that run together, in their order; `params` are for all, or for each its own.

    `advance` is called once for each prompt. Raises RequestError for a prompt that cannot be served, before any of
    them runs; Ctrl-C while it waits cancels all.
    """
    settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(settings) != len(prompts):
        raise RequestError(f"sampling_params: expected one for each of {len(prompts)} prompts, found {len(settings)}")
    sequences = [(prompt, each.nth(i)) for prompt, each in zip(prompts, settings, strict=True) for i in range(each.n)]
    pending = backend.prepare([prompt for prompt, _ in sequences], [each for _, each in sequences])
    try:
        for request in pending:
            request.submit()
        waiting, answers = iter(pending), []
        for prompt, each in zip(prompts, settings, strict=True):
            first, *others = [
                msgspec.structs.replace(next(waiting).result(), prompt=prompt, index=index) for index in range(each.n)
            ]
            answers.append(msgspec.structs.replace(first, others=tuple(others)))
            advance()
    except BaseException:  # Ctrl-C while waiting, above all
        for request in pending:
            request.cancel()
        raise
    return answers
