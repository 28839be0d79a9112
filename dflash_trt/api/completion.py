# SPDX-License-Identifier: Apache-2.0
"""What a request came to: its tokens, its text, and what they cost."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop token or a stop text."""
    LENGTH = "length"
    """max_tokens."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The target's logits were NaN or infinite: there is no next token."""


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a prompt's tokens but the first, which nothing precedes."""

    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    """Of the most likely tokens in the place of each; None unless asked for."""


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
    def steps(self) -> int | None:
        """Verify passes of the target; the prefill is none."""
        return None if self.acceptance is None else self.acceptance.passes

    @property
    def tau(self) -> float | None:
        """Tokens after the first / steps; None without a step."""
        return None if self.acceptance is None else self.acceptance.tau
