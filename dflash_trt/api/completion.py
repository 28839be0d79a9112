# SPDX-License-Identifier: Apache-2.0
"""What a request came to: its tokens, its text, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.runtime.request import FinishReason, Request


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a prompt's tokens but the first, which nothing precedes."""

    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    """Of the most likely tokens in the place of each; None unless asked for."""

    @classmethod
    def of(cls, request: Request) -> PromptLogprobs | None:
        """Those of a request whose prompt has been read."""
        if not request.params.prompt_logprobs:
            return None
        top = list(request.prompt_top_logprobs) if request.params.top_logprobs else None
        return cls(logprobs=list(request.prompt_logprobs), top_logprobs=top)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request; times are wall times in seconds, model loading excluded.

    What a runtime does not know is None.
    """

    token_ids: list[int]
    """Emitted tokens, a final stop token included."""
    text: str
    """Their text, special tokens and a stop text left out; empty without a tokenizer."""
    finish_reason: str
    """A FinishReason, or another word of TensorRT-LLM's."""
    stop_reason: str | int | None
    """The stop text or the token of `stop_token_ids` that ended it; None for any other end."""
    logprobs: list[float] | None
    """Log probability of each token under the target, before temperature and filters; None unless asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """Of the most likely tokens in the place of each, most likely first; None unless asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the prompt; None unless asked for."""
    cumulative_logprob: float | None
    """Their sum."""
    seed: int | None
    """What tokens were drawn with; greedy decoding draws none. A request that gives it draws the same tokens, unless
    this one gave none and its proposals were drawn, too (docs/sampling.md)."""
    acceptance: Acceptance | None
    """Its verify passes, and what they accepted."""
    arrived: float
    """When it was asked, on the clock of time.perf_counter or of TensorRT-LLM."""
    queue_seconds: float | None
    """From arrival to admission."""
    ttft_seconds: float | None
    """From arrival to the first token; None when there is none."""
    itl_seconds: float | None
    """Inter-token latency: from first to last token / tokens after the first; None without one."""
    seconds: float
    """From arrival to the end, right behind the last token."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that an earlier request had left in the caches."""
    other_metrics: dict[str, float] = {}
    """What only this runtime measures, by its own names."""
    prompt: str | Sequence[int] | None = None
    """As it was given, a conversation as its token ids; None in a stream."""
    prompt_token_ids: list[int] | None = None
    index: int = 0
    """Among the `n` answers to its prompt."""
    others: tuple[Completion, ...] = ()
    """The answers after the first, in the first."""

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """All `n` answers to its prompt, itself first: vLLM's `.outputs[0].text`."""
        return (self, *self.others)

    @property
    def finished(self) -> bool:
        """Always: what is not is a Chunk."""
        return True

    def __iter__(self) -> Iterator[Completion]:
        """Itself: vLLM answers one prompt, too, with a list."""
        return iter((self,))

    def __getitem__(self, index: int) -> Completion:
        """Itself at 0."""
        return (self,)[index]

    @property
    def steps(self) -> int | None:
        """Verify passes of the target; the prefill is none."""
        return None if self.acceptance is None else self.acceptance.passes

    @property
    def tau(self) -> float | None:
        """Tokens after the first / steps; None without a step."""
        return None if self.acceptance is None else self.acceptance.tau


def completion(request: Request) -> Completion:
    """The answer of a finished request; raises its error where the target could not say a token of it."""
    assert request.finished is not None
    if request.finished is FinishReason.ERROR:
        assert request.error is not None
        raise request.error
    assert request.ended is not None
    tokens = len(request.token_ids)
    first, last = (request.emitted[0], request.emitted[-1]) if request.emitted else (None, None)
    return Completion(
        token_ids=list(request.token_ids),
        prompt_token_ids=list(request.prompt_ids),
        text="" if request.text is None else request.text.text,
        finish_reason=request.finished,
        stop_reason=_stop_reason(request),
        logprobs=list(request.logprobs) if request.params.logprobs else None,
        top_logprobs=list(request.top_logprobs) if request.params.top_logprobs else None,
        prompt_logprobs=PromptLogprobs.of(request),
        cumulative_logprob=sum(request.logprobs) if request.params.logprobs else None,
        seed=request.sampler.seed,
        acceptance=Acceptance.of(request.steps),
        arrived=request.arrived,
        queue_seconds=(request.admitted or request.ended) - request.arrived,
        ttft_seconds=None if first is None else first - request.arrived,
        itl_seconds=(last - first) / (tokens - 1) if first is not None and last is not None and tokens > 1 else None,
        seconds=request.ended - request.arrived,
        num_cached_tokens=request.num_cached_tokens,
    )


def _stop_reason(request: Request) -> str | int | None:
    if request.finished is not FinishReason.STOP:
        return None
    if request.text is not None and request.text.stopped_by is not None:
        return request.text.stopped_by
    last = request.token_ids[-1]
    return last if last in request.params.stop_ids else None
