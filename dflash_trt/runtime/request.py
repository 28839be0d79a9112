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

if TYPE_CHECKING:
    from dflash_trt.runtime.logits_processors import LogitsProcessor
    from dflash_trt.runtime.text import TextStream


NAN_HINT = "look for NaN in the target's weights; download or copy them again"


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

    answer: _C.Answer = field(init=False)
    """Tokens so far, and what each pass of the target added to them."""
    is_simple: bool = field(init=False)
    """Whether nothing changes the logits that its tokens are drawn from, or reads them, but the choice of tokens."""
    context_ids: Sequence[int] = ()
    """Tokens to read before the next one is decoded: the prompt, after `restart` with the answer so far."""
    num_unread: int = field(init=False)
    """Tokens of them that target and drafter have not seen."""
    ending: FinishReason | None = None
    """Reason why no token follows, until `finish` makes it the reason of `finished`."""
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    logprobs: list[float] = field(default_factory=list)
    """Log probability of each emitted token, if asked for."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log probabilities of the most likely tokens in the place of each, most likely first."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log probability of each prompt token but the first, if asked for."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log probabilities of the most likely tokens in the place of each prompt token."""
    finished: FinishReason | None = None

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    """Time at which it left the queue."""
    ended: float | None = None
    error: Exception | None = None
    """Cause of an incomplete answer: this request's logits, or a decoder that failed."""

    def __post_init__(self) -> None:
        params, self.context_ids, self.num_unread = self.params, self.prompt_ids, len(self.prompt_ids)
        penalised = self.prompt_ids if params.penalizes else ()
        self.answer = _C.Answer(self.sampler, list(penalised), params.max_tokens, list(self.stop_ids))
        self.is_simple = not (self.processors or params.logprobs)
        if self.text is not None:
            self.text.answer = self.answer

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.answer.token_ids()

    @property
    def steps(self) -> list[Step]:
        """Verify passes, without the prefill, which emits the first token."""
        return steps_of(self.answer.passes(1))

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
        return bool(self.params.prompt_logprobs) and not len(self.answer)

    @property
    def num_prefilled(self) -> int:
        """Context tokens that are in the caches."""
        return len(self.context_ids) - self.num_unread

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole context is in the caches."""
        return not self.num_unread

    @property
    def draw(self) -> Draw | None:
        """Temperature and seed to draw proposals with; None for greedy ones."""
        return Draw(self.sampler, len(self.answer)) if self.draws_freely else None

    @property
    def draws_freely(self) -> bool:
        """Whether proposals may be drawn: no seed promises the tokens of plain decoding."""
        return self.params.temperature > 0 and self.params.seed is None

    def forced(self, limit: int) -> list[int]:
        """Tokens, at most `limit`, that a grammar leaves no choice about."""
        return next((tokens[:limit] for processor in self.processors if (tokens := processor.forced())), [])

    def restart(self) -> None:
        """Begins again without a slot: what it has emitted becomes context, so its next tokens stay the same."""
        self.context_ids = [*self.prompt_ids, *self.token_ids]
        self.num_unread = len(self.context_ids)
        if not len(self.answer):
            self.prompt_logprobs, self.prompt_top_logprobs = [], []

    def finish(self, reason: FinishReason) -> FinishReason:
        """Ends the answer; returns the reason, which may be a stop text at its very end."""
        if self.text is not None:
            self.text.close()
            if reason is FinishReason.LENGTH and self.text.stopped_by is not None:  # with an incomplete character
                reason = FinishReason.STOP
        for logprobs in (self.logprobs, self.top_logprobs):
            del logprobs[len(self.answer) :]  # accepted tokens after the end
        self.finished = reason
        self.ended = time.perf_counter()
        return reason

    def report(self) -> None:
        """Calls `on_progress`: there are new tokens, or the answer has ended."""
        if self.on_progress is not None:
            self.on_progress(self)

    def end_at_stop_text(self) -> None:
        """Shows the new tokens to its text; ends the answer with the one that completes a stop text, if one does."""
        assert self.text is not None
        num_tokens = self.text.take_new()
        if self.text.stopped_by is not None:
            self.answer.cut(num_tokens)
            self.ending = FinishReason.STOP


def append_all(requests: Sequence[Request], drafted: list[Proposals], accepted: list[list[int]], now: float) -> bool:
    """Appends accepted proposals and the token after them to each answer, up to the first that ends it.

    Without any, logits were not finite: the answer is `ending` with an error. Returns whether one has ended.
    """
    ended = _C.append_all([request.answer for request in requests], drafted, accepted, now)
    for index, reason in ended:
        requests[index].ending = FinishReason(reason)
    stopping = [request for request in requests if request.text is not None and request.text.stop]
    for request in stopping:
        request.end_at_stop_text()
    return bool(ended) or any(request.ending is not None for request in stopping)


def steps_of(passes: Sequence[tuple[float, tuple[int, ...], tuple[int, ...], int, bool]]) -> list[Step]:
    """Verify passes of an `_C.Answer` as they are reported."""
    return [
        Step(token_ids=token_ids, proposals=drafts, accepted=accepted, is_forced=is_forced)
        for _, token_ids, drafts, accepted, is_forced in passes
    ]
