# SPDX-License-Identifier: Apache-2.0
"""One request on its way from the queue to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from dflash_trt import _C
from dflash_trt.api.acceptance import Step
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.drafter.proposals import Draw
from dflash_trt.runtime.logits_processors import LogitsProcessor
from dflash_trt.runtime.text import TextStream


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step did for the requests that it verified a block of."""

    proposed: Sequence[int]  # [B], drafts that were verified
    accepted: Sequence[int]  # [B]
    num_prompt_tokens: int  # of prompts, read in the same pass
    num_caught_up: int  # requests of which the drafter also read context of steps that did not draft


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What was asked, what was answered so far, and when."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    sampler: _C.SamplerParams
    """`params` as the sampling rule takes them, with the seed that tokens are drawn with."""
    stop_ids: frozenset[int]
    text: TextStream | None = None
    processors: Sequence[LogitsProcessor] = ()
    """What changes the target's logits before a token is drawn from them."""
    on_progress: Callable[[Request], None] | None = None
    """Called after each step that emitted tokens, and at the end, on the thread that steps."""

    num_prefilled: int = 0
    """Prompt tokens that target and drafter have seen."""
    num_cached_tokens: int = 0
    """Those among them that an earlier request left in the caches."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each emitted token, where they were asked for."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Of the most likely tokens in its place, most likely first."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of each token of the prompt but the first, where they were asked for ..."""
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """... and of the most likely tokens in its place."""
    steps: list[Step] = field(default_factory=list)
    """The verify passes; the prefill, which emits the first token, is none."""
    finished: FinishReason | None = None

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    emitted: list[float] = field(default_factory=list)
    """When the first token came, and then each step's."""
    ended: float | None = None
    error: Exception | None = None
    """Why there is no whole answer: this request's own logits, or a decoder that gave up."""

    @property
    def max_length(self) -> int:
        """The longest that prompt and answer can become."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def cacheable_prompt_ids(self) -> Sequence[int]:
        """The prompt that may begin with what others left in the caches, where it needs no logits."""
        return () if self.params.prompt_logprobs else self.prompt_ids

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is in the caches."""
        return self.num_prefilled == len(self.prompt_ids)

    @property
    def num_computed(self) -> int:
        """Tokens of prompt and answer that the target has seen: all but the last, which waits for the next pass."""
        return self.num_prefilled + max(0, len(self.token_ids) - 1)

    def tokens(self, positions: range) -> list[int]:
        """Those of prompt and answer at `positions`, as far as there are any."""
        begin, end = (max(0, position - len(self.prompt_ids)) for position in (positions.start, positions.stop))
        return [*self.prompt_ids[positions.start : positions.stop], *self.token_ids[begin:end]]

    @property
    def draw(self) -> Draw | None:
        """With what its next proposals may be drawn; None where a seed promises the tokens of plain sampling."""
        is_free = self.params.temperature > 0 and self.params.seed is None
        return Draw(self.sampler, len(self.token_ids)) if is_free else None

    @property
    def remaining(self) -> int:
        """Tokens until max_tokens."""
        return self.params.max_tokens - len(self.token_ids)

    def draft_length(self, chosen: int) -> int:
        """How many of the `chosen` draft tokens a pass verifies for it: none beyond its limit."""
        return min(chosen, self.remaining - 1)

    def admit(self) -> None:
        """Leaves the queue."""
        self.admitted = time.perf_counter()

    def emit(self, token_ids: Sequence[int], proposals: Sequence[int]) -> Step | None:
        """Appends accepted proposals and the token behind them, up to the first that ends the answer.

        Returns what a verify pass came to, and None for the prefill's token.
        """
        self.emitted.append(time.perf_counter())
        is_prefill = not self.token_ids
        taken = 0
        while taken < len(token_ids) and self.finished is None:
            self._append(token_ids[taken])
            taken += 1
        for logprobs in (self.logprobs, self.top_logprobs):
            del logprobs[len(self.token_ids) :]  # of accepted tokens behind the end
        if is_prefill:
            return None
        accepted = min(taken, len(token_ids) - 1)
        self.steps.append(Step(token_ids=tuple(token_ids[:taken]), proposals=tuple(proposals), accepted=accepted))
        return self.steps[-1]

    def finish(self, reason: FinishReason) -> None:
        """Ends the answer."""
        if self.text is not None:
            self.text.close()
            if reason is FinishReason.LENGTH and self.text.stopped_by is not None:  # with an incomplete character
                reason = FinishReason.STOP
        self.finished = reason
        self.ended = time.perf_counter()

    def report(self) -> None:
        """Tells who listens that there are new tokens, or that the answer has ended."""
        if self.on_progress is not None:
            self.on_progress(self)

    def _append(self, token: int) -> None:
        self.token_ids.append(token)
        has_stop_text = self.text is not None and self.text.push(token)
        if has_stop_text or token in self.stop_ids:
            self.finish(FinishReason.STOP)
        elif self.remaining == 0:
            self.finish(FinishReason.LENGTH)
