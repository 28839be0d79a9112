# SPDX-License-Identifier: Apache-2.0
"""One request on its way from the queue to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_trt import _C
from dflash_trt.api.acceptance import Step
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.emissions import Emissions

if TYPE_CHECKING:
    from dflash_trt.runtime.logits_processors import LogitsProcessor
    from dflash_trt.runtime.text import TextStream


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request: prompt, settings, the answer so far, and times."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    sampler: _C.SamplerParams
    """`params` as the sampling rule takes them, with the seed in use."""
    stop_ids: frozenset[int]
    text: TextStream | None = None
    processors: Sequence[LogitsProcessor] = ()
    """Processors that change the target's logits before a token is drawn."""
    on_progress: Callable[[Request], None] | None = None
    """Called after each step that emitted tokens, and at the end, on the thread that steps."""
    client: str = ""
    """Sender; clients take turns (`policy.client_queue`)."""

    is_argmax: bool = field(init=False)
    """Whether its tokens are the argmax of the target's logits, unless a processor changes these."""
    is_simple: bool = field(init=False)
    """Whether nothing changes its logits, or reads them, but the choice of tokens."""
    context_ids: Sequence[int] = ()
    """Tokens to read before the next one is decoded: the prompt, after `restart` with the answer so far."""
    num_prefilled: int = 0
    """Tokens of them that target and drafter have seen."""
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log probability of each emitted token, if asked for."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log probabilities of the most likely tokens in the place of each, most likely first."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log probability of each prompt token but the first, if asked for."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log probabilities of the most likely tokens in the place of each prompt token."""
    emissions: Emissions = field(default_factory=Emissions)
    ending: FinishReason | None = None
    """Reason why no token follows, until `finish` makes it the reason of `finished`."""
    finished: FinishReason | None = None

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    """Time at which it left the queue."""
    ended: float | None = None
    error: Exception | None = None
    """Cause of an incomplete answer: this request's logits, or a decoder that failed."""

    def __post_init__(self) -> None:
        self.context_ids = self.prompt_ids
        self.is_argmax = self.params.temperature == 0 and not self.params.penalizes
        self.is_simple = not (self.processors or self.params.logprobs or self.params.prompt_logprobs)

    @property
    def steps(self) -> list[Step]:
        """Verify passes, without the prefill, which emits the first token."""
        return self.emissions.read(self.token_ids).steps

    @property
    def max_length(self) -> int:
        """Largest number of tokens that prompt and answer can have."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def cacheable_ids(self) -> Sequence[int]:
        """Context ids to look up in the prefix cache; none where the prompt's own logits are needed."""
        return () if self.needs_prompt_logprobs else self.context_ids

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether reading the prompt must compute its log probabilities."""
        return bool(self.params.prompt_logprobs) and not self.token_ids

    @property
    def num_unread(self) -> int:
        """Context tokens that are not in the caches yet."""
        return len(self.context_ids) - self.num_prefilled

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole context is in the caches."""
        return self.num_prefilled == len(self.context_ids)

    @property
    def draw(self) -> Draw | None:
        """Temperature and seed to draw proposals with; None for greedy ones."""
        return Draw(self.sampler, len(self.token_ids)) if self.draws_freely else None

    @property
    def draws_freely(self) -> bool:
        """Whether proposals may be drawn: no seed promises the tokens of plain decoding."""
        return self.params.temperature > 0 and self.params.seed is None

    def forced(self, limit: int) -> list[int]:
        """Tokens, at most `limit`, that a grammar leaves no choice about."""
        return next((tokens[:limit] for processor in self.processors if (tokens := processor.forced())), [])

    @property
    def remaining(self) -> int:
        """Tokens until max_tokens."""
        return self.params.max_tokens - len(self.token_ids)

    def append(self, token_ids: list[int], drafted: Proposals, now: float) -> int:
        """Appends accepted proposals and the token after them, up to the first that ends the answer; their number.

        Where there are none, logits were not finite, and the answer is `ending` with an error.
        """
        answer, taken = self.token_ids, len(token_ids)
        if taken == 0:
            self.ending = FinishReason.ERROR
            return 0
        is_last = taken >= self.params.max_tokens - len(answer) or not self.stop_ids.isdisjoint(token_ids)
        if is_last or (self.text is not None and self.text.stop):
            taken = self._until_end(token_ids)
        elif self.text is not None:
            self.text.extend(token_ids)
        self.emissions.add(now, drafted, taken, taken if taken < len(token_ids) else taken - 1)
        answer += token_ids[:taken]
        if self.logprobs:
            for logprobs in (self.logprobs, self.top_logprobs):
                del logprobs[len(answer) :]  # accepted tokens after the end
        return taken

    def restart(self) -> None:
        """Begins again without a slot: what it has emitted becomes context, so its next tokens stay the same."""
        self.context_ids, self.num_prefilled = [*self.prompt_ids, *self.token_ids], 0
        if not self.token_ids:
            self.prompt_logprobs, self.prompt_top_logprobs = [], []

    def finish(self, reason: FinishReason) -> FinishReason:
        """Ends the answer; returns the reason, which may be a stop text at its very end."""
        if self.text is not None:
            self.text.close()
            if reason is FinishReason.LENGTH and self.text.stopped_by is not None:  # with an incomplete character
                reason = FinishReason.STOP
        self.finished = reason
        self.ended = time.perf_counter()
        return reason

    def report(self) -> None:
        """Calls `on_progress`: there are new tokens, or the answer has ended."""
        if self.on_progress is not None:
            self.on_progress(self)

    def _until_end(self, token_ids: Sequence[int]) -> int:
        """Number of the tokens that belong to the answer; the last one may end it."""
        count = remaining = self.remaining
        if not self.stop_ids.isdisjoint(token_ids):
            count = 1 + next(place for place, token in enumerate(token_ids) if token in self.stop_ids)
        count = min(count, remaining, len(token_ids))
        if self.text is not None:
            count = self.text.extend(token_ids[:count])
        last = token_ids[count - 1]
        if last in self.stop_ids or (self.text is not None and self.text.stopped_by is not None):
            self.ending = FinishReason.STOP
        elif count == remaining:
            self.ending = FinishReason.LENGTH
        return count
