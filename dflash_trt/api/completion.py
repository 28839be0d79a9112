# SPDX-License-Identifier: Apache-2.0
"""The answer to a request: tokens, text, log probabilities and times."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop token or a stop text ended the answer."""
    LENGTH = "length"
    """The answer reached max_tokens."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The target's logits were NaN or infinite: there is no next token."""


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a prompt's tokens, from the second one on."""

    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    """Log probabilities of the most likely tokens at each position; None unless requested."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request; times are wall times in seconds, model loading excluded.

    A field that a runtime does not know is None.
    """

    token_ids: list[int]
    """Emitted tokens, a final stop token included."""
    text: str
    """Text of the tokens without special tokens and a stop text; empty without a tokenizer."""
    finish_reason: str
    """A FinishReason, or TensorRT-LLM's own."""
    stop_reason: str | int | None
    """The stop text or the token of `stop_token_ids` that ended it; None for any other end."""
    logprobs: list[float] | None
    """Log probability of each token under the target, before temperature and filters; None unless requested."""
    top_logprobs: list[dict[int, float]] | None = None
    """Log probabilities of the most likely tokens at each position, highest first; None unless requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt; None unless requested."""
    cumulative_logprob: float | None
    """Sum of `logprobs`."""
    seed: int | None
    """Seed that tokens were drawn with. A request with this seed draws the same tokens, unless this one gave none and
    drew its proposals, too (docs/sampling.md)."""
    acceptance: Acceptance | None
    """Verify passes of this request, and the draft tokens that they accepted."""
    arrived: float
    """Time of arrival, on the clock of time.perf_counter or of TensorRT-LLM."""
    queue_seconds: float | None
    """Seconds from arrival to admission."""
    ttft_seconds: float | None
    """Seconds from arrival to the first token; None without one."""
    itl_seconds: float | None
    """Inter-token latency: seconds from first to last token / tokens after the first; None for fewer than two."""
    seconds: float
    """Seconds from arrival to the end, right after the last token."""
    num_cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache."""
    other_metrics: dict[str, float] = {}
    """Metrics that only this runtime measures, under its own names."""
    prompt: str | Sequence[int] | None = None
    """The prompt as given, or a conversation's token ids; None in a stream."""
    prompt_token_ids: list[int] | None = None
    index: int = 0
    """Index among the `n` answers to the prompt."""
    others: tuple[Completion, ...] = ()
    """Answers 1 to n - 1 to the same prompt; set on the first answer."""

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """All `n` answers to the prompt, this one first: vLLM's `.outputs[0].text`."""
        return (self, *self.others)

    @property
    def steps(self) -> int | None:
        """Verify passes of the target, without the prefill."""
        return None if self.acceptance is None else self.acceptance.all_passes

    @property
    def tau(self) -> float | None:
        """Acceptance length: tokens per verify pass, forced ones left out; None without a pass."""
        return None if self.acceptance is None else self.acceptance.tau
