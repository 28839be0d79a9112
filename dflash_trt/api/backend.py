# SPDX-License-Identifier: Apache-2.0
"""The interface of every runtime to command line, Triton, Dynamo and HTTP server, and its metrics. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from dflash_trt.api.acceptance import Acceptance, Step
from dflash_trt.api.completion import Completion, FinishReason, PromptLogprobs
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DecoderTotals(msgspec.Struct, kw_only=True):
    """Totals since the decoder started."""

    passes: int = 0
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int] = msgspec.field(default_factory=Counter)
    """Requests that ended, by reason."""
    output_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of admitted requests, with prefix caching."""
    prefix_cache_hits: int = 0
    """Prompt tokens served from the prefix cache."""


class DecoderMetrics(DecoderTotals, kw_only=True):
    """A reading of the decoder: its current state and its totals."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    free_slots: int
    free_cache_tokens: int
    """Tokens that fit in the unreserved pages."""
    draft_length: str
    """Drafted tokens that a step verifies now, and the reason."""
    acceptance: Acceptance
    """Counts of all verify passes since the decoder started."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass; None without one."""
        return self.acceptance.tau


Prompt = str | Sequence[int]
"""Text without a chat template, or token ids."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Text and tokens that one step added to an answer."""

    text: str
    """New text; a possible beginning of a stop text, or an incomplete character, is held back."""
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Log probability of each token; None unless requested and known by the runtime during the answer."""
    top_logprobs: list[dict[int, float]] | None = None
    """Log probabilities of the most likely tokens at each position; None unless requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt, on the first chunk; None unless requested."""
    steps: list[Step] = []
    """Verify passes that emitted these tokens, after the prefill's token; empty where the runtime does not know."""
    emitted: list[float] = []
    """Times of the prefill's token and of each pass, on the clock of time.perf_counter."""
    completion: Completion | None
    """The whole answer, on the last chunk."""


class PendingAnswer(Protocol):
    """A request whose caller waits for the whole answer."""

    def submit(self) -> None:
        """Queues the request."""

    def result(self) -> Completion:
        """Waits for the answer."""

    def cancel(self) -> None:
        """Ends the request; no effect before `submit` or after its end."""


class Backend(Protocol):
    """A runtime that answers many requests at once."""

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Sequence[PendingAnswer]:
        """A request for each prompt, not submitted yet; RequestError for the first that cannot be served."""

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step, or in one chunk unless `incremental`; closing the iterator cancels the request.

        Submits the request at the first `anext`. Raises RequestError for an invalid one.
        """

    def metrics(self) -> DecoderMetrics | None:
        """Current metrics; None where the runtime publishes its own."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens that one step verifies; 0 for plain decoding."""

    def close(self) -> None:
        """Cancels running requests and ends the runtime."""


def run(
    backend: Backend,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    advance: Callable[[], object] = lambda: None,
) -> list[Completion]:
    """The answers to prompts that run together, in order; `params` has one entry for all prompts or one for each.

    Calls `advance` once for each prompt. Raises RequestError for an invalid prompt before any of them runs; Ctrl-C
    cancels all.
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
