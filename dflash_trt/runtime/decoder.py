# SPDX-License-Identifier: Apache-2.0
"""The decode loop: admit, draft, verify, accept, commit, emit (DFlash, arXiv 2602.06036).

* admit: requests take slots, first come, first served
* draft: one pass of the drafter proposes a block behind the last token of each request
* verify: one pass of the target over all blocks, and over chunks of prompts that are still being read
* accept: proposals that the target would have emitted itself, and its own token after them
* commit: roll back what was rejected, inject what was accepted into the drafter's context
* emit: new tokens go out; requests that have ended leave their slots

Requests join and leave between steps, each at its own length (continuous batching: Orca, OSDI 2022).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.api.acceptance import AcceptanceCounter
from dflash_trt.api.backend import DecoderMetrics, DecoderTotals
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.engine.proposals import Proposals
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import EngineError
from dflash_trt.runtime.accept import NO_PROPOSALS, ProposalChoice, StepInput, accept_parts
from dflash_trt.runtime.draft_length import DraftLength, StepRecord
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.request import Request

if TYPE_CHECKING:
    from dflash_trt.runtime.model_runner import ModelRunner


class CacheOwner:
    """Decoder whose requests are in caches that several decoders share, one after the other."""

    holder: Decoder | None = None
    """Decoder with running requests; None while no request runs."""
    pool: SlotPool | None = None
    """Pool of the decoder that wrote the pages last."""


class Decoder:
    """Steps all requests it was given, first come, first served, until each has finished."""

    def __init__(
        self, runner: ModelRunner, slots: SlotPool, policy: DraftLength, *,
        prefill_chunk: int = DEFAULTS.prefill_chunk, cache_owner: CacheOwner | None = None,
    ) -> None:  # fmt: skip
        """Reads at most `prefill_chunk` prompt tokens in a step, so that a long prompt does not stall the others.

        Decoders of the same models share one `cache_owner`: when one admits a request, what runs on another is
        cancelled.
        """
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        """Requests by slot, in the order of admission."""
        self._totals, self._acceptance = DecoderTotals(), AcceptanceCounter()
        self._runner = runner
        self._prefixes = PrefixSharing(runner, slots, self.running)
        self._policy = policy
        self._proposal_choice = ProposalChoice()
        self._prefill_chunk = prefill_chunk
        self._cache_owner = cache_owner or CacheOwner()

    def step(self) -> None:
        """Advances all running requests by one pass of the target."""
        self._admit()
        parts = [*self._draft(), *self._prompt_chunks()]
        if not parts:
            return
        logits = self._runner.verify([part.segment for part in parts])
        accepted = accept_parts(parts, logits)
        self._runner.commit([part.num_committed(tokens) for part, tokens in zip(parts, accepted, strict=True)])
        self._totals.passes += 1
        record = StepRecord.of(parts, accepted)
        for part, tokens in zip(parts, accepted, strict=True):
            if tokens:
                self._proposal_choice.observe(part.request, part.drafted, len(tokens) - 1)
            self._emit(part, tokens)
        self._prefixes.publish()
        self._policy.observe(record)

    def add(self, request: Request) -> None:
        """Queues a request; it must fit the empty pool."""
        assert request.max_length <= self.slots.num_tokens, "a request that never fits would block the others"
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request between two steps, with what it has; one that has ended stays as it is."""
        if request.finished is not None:
            return
        slot = next((slot for slot, running in self.running.items() if running is request), None)
        if slot is not None:
            self._prefixes.leave(slot)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._end(request, slot, FinishReason.CANCELLED)

    def run(self, requests: Sequence[Request]) -> None:
        """Steps until `requests`, and whatever runs already, have ended."""
        for request in requests:
            self.add(request)
        while not self.is_idle:
            self.step()

    def close(self) -> None:
        """Lets go of both models and of all requests; the last call but `metrics`."""
        self.running.clear()
        self.waiting.clear()
        del self._runner, self._prefixes

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.waiting and not self.running

    def metrics(self) -> DecoderMetrics:
        """Current load, and totals since the decoder was made."""
        return DecoderMetrics(
            running=len(self.running),
            waiting=len(self.waiting),
            free_slots=self.slots.free_slots,
            free_cache_tokens=self.slots.free_tokens,
            draft_length=self._policy.explain(),
            acceptance=self._acceptance.read(),
            **msgspec.structs.asdict(self._totals) | {"finished": dict(self._totals.finished)},
        )

    def _admit(self) -> None:
        while self.waiting and self.slots.fits(self.waiting[0].max_length):
            prompt_ids = self.waiting[0].cacheable_prompt_ids
            self._prefixes.share(prompt_ids)
            if self._prefixes.awaits(prompt_ids):
                return
            self._take_caches()
            request = self.waiting.popleft()
            request.admitted = time.perf_counter()
            slot, pages, request.num_cached_tokens = self.slots.allocate(request.max_length, prompt_ids)
            self._runner.reserve(slot, pages, request.num_cached_tokens)
            request.num_prefilled = request.num_cached_tokens
            if self.slots.prefix_caching:
                self._totals.prefix_cache_queries += len(request.prompt_ids)
                self._totals.prefix_cache_hits += request.num_cached_tokens
            self.running[slot] = request

    def _take_caches(self) -> None:
        """Cancels the requests that another decoder has in the caches, and forgets prefixes that it has overwritten."""
        owner = self._cache_owner
        if owner.holder is not None and owner.holder is not self:
            for slot, request in list(owner.holder.running.items()):
                owner.holder._end(request, slot, FinishReason.CANCELLED)
        if owner.pool is not self.slots:
            self.slots.forget()
        owner.holder, owner.pool = self, self.slots

    def _draft(self) -> list[StepInput]:
        """Blocks: the last token of each request behind its prompt, and drafts that follow it."""
        decoding = [(slot, request) for slot, request in sorted(self.running.items()) if request.is_prefilled]
        limits = self._policy.limits([request for _, request in decoding])
        drafting = [(slot, request) for (slot, request), limit in zip(decoding, limits, strict=True) if limit > 0]
        blocks: dict[int, Proposals] = {}
        if drafting:
            slots, anchors = [slot for slot, _ in drafting], [request.token_ids[-1] for _, request in drafting]
            draws = [self._proposal_choice.draw(request) for _, request in drafting]
            drafted = self._runner.draft(slots, anchors, max(limits), draws)
            blocks = dict(zip(slots, drafted, strict=True))
        parts = []
        for (slot, request), limit in zip(decoding, limits, strict=True):
            proposals = blocks[slot].first(limit) if slot in blocks else NO_PROPOSALS
            proposals = self._policy.cut(proposals, request.params.draft_length)
            token_ids = [request.token_ids[-1], *proposals.token_ids]
            parts.append(StepInput(slot, request, token_ids, proposals, len(token_ids)))
        return parts

    def _prompt_chunks(self) -> list[StepInput]:
        """The next tokens of unfinished prompts, oldest request first."""
        parts, room = [], self._prefill_chunk
        for slot, request in self.running.items():
            begin = request.num_prefilled
            if chunk := request.prompt_ids[begin : begin + room]:
                is_last = begin + len(chunk) == len(request.prompt_ids)
                num_prompt_logits = len(chunk) - is_last if request.params.prompt_logprobs else 0
                parts.append(StepInput(slot, request, chunk, NO_PROPOSALS, int(is_last), num_prompt_logits))
                room -= len(chunk)
        return parts

    def _emit(self, part: StepInput, tokens: Sequence[int]) -> None:
        """Appends a part's new tokens to its request and reports them; a request that ends leaves its slot."""
        request = part.request
        if part.num_logits > 0 and not tokens:
            self._fail(part)
            return
        if not request.is_prefilled:
            request.num_prefilled += len(part.token_ids)
        if not tokens:
            return
        step = request.emit(tokens, part.proposals)
        self._totals.output_tokens += 1 if step is None else len(step.token_ids)  # the prefill has no step
        if step is not None:
            self._acceptance.add(step)
        if request.finished is None:
            request.report()
        else:
            self._prefixes.leave(part.slot)
            self._end(request, part.slot, request.finished)

    def _fail(self, part: StepInput) -> None:
        """Ends a request whose next logits are not finite; the others go on."""
        request = part.request
        request.error = request.error or EngineError(
            f"token {len(request.token_ids) + 1} of the answer: expected finite logits from the target, found NaN or"
            " infinity",
            hint="look for NaN in the target's weights; download or copy them again",
        )
        self._end(request, part.slot, FinishReason.ERROR)

    def _end(self, request: Request, slot: int | None, reason: FinishReason) -> None:
        """Ends a request that has not ended yet, counts and reports it, and frees its slot."""
        if request.finished is None:
            request.finish(reason)
        self._totals.finished[reason] += 1
        if slot is not None:
            self._runner.release(slot)
            self.slots.free(slot)
            del self.running[slot]
            if not self.running:
                self._cache_owner.holder = None
        request.report()


class PrefixSharing:
    """Lets requests begin with full pages that earlier ones, or running ones, have computed."""

    def __init__(self, runner: ModelRunner, slots: SlotPool, running: Mapping[int, Request]) -> None:
        self._runner, self._slots, self._running = runner, slots, running

    def share(self, prompt_ids: Sequence[int]) -> None:
        """Shares the pages at the beginning of a prompt that running requests have computed, page by page."""
        while ahead := self._computing_next_page(prompt_ids):
            end = self._next_page_end(prompt_ids)
            computed = [slot for slot in ahead if self._running[slot].num_computed >= end]
            for slot in computed:
                self.leave(slot)
            if not computed or self._slots.num_cached(prompt_ids) < end:  # another decoder may have taken the caches
                return

    def awaits(self, prompt_ids: Sequence[int]) -> bool:
        """Whether running requests are computing the next page that a prompt could begin with.

        Waiting for it pays: prompts are read oldest first, so this one would seldom have been read before that.
        """
        ahead, end = self._computing_next_page(prompt_ids), self._next_page_end(prompt_ids)
        return bool(ahead) and all(self._running[slot].num_computed < end for slot in ahead)

    def publish(self) -> None:
        """Shares the full pages that the last step has completed in both caches."""
        if self._slots.prefix_caching:
            for slot in self._running:
                self._publish(slot)

    def leave(self, slot: int) -> None:
        """Shares the pages of a request that leaves; the drafter catches up where that fills a page."""
        if self._slots.unpublished(slot, self._running[slot].num_computed):
            self._runner.catch_up()
            self._publish(slot)

    def _publish(self, slot: int) -> None:
        if unpublished := self._slots.unpublished(slot, self._runner.num_written(slot)):
            self._slots.publish(slot, self._running[slot].tokens(unpublished))

    def _computing_next_page(self, prompt_ids: Sequence[int]) -> list[int]:
        """Slots of running requests whose prompts begin as this one does, up to its first page that is not shared."""
        end = self._next_page_end(prompt_ids)
        if not self._slots.prefix_caching or end >= len(prompt_ids):
            return []
        return [slot for slot, request in self._running.items() if request.prompt_ids[:end] == prompt_ids[:end]]

    def _next_page_end(self, prompt_ids: Sequence[int]) -> int:
        return self._slots.num_cached(prompt_ids) + TOKENS_PER_PAGE
