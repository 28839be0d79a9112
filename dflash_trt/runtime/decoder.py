# SPDX-License-Identifier: Apache-2.0
"""The decode loop: admit, draft, verify, accept, commit, emit (DFlash, arXiv 2602.06036).

* admit: waiting requests take slots
* draft: one pass of the drafter proposes a block after the last token of each request
* verify: one pass of the target over all blocks, and over chunks of prompts that are still being read
* accept: proposals that the target would have emitted itself, and its own token after them
* commit: roll back what was rejected, inject what was accepted into the drafter's context
* emit: new tokens go out; requests that have ended leave their slots

Requests join and leave between steps, each at its own length (continuous batching: Orca, OSDI 2022). Decisions are made
in `policy/`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.api.acceptance import AcceptanceCounter
from dflash_trt.api.backend import DecoderMetrics, DecoderTotals
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.engine.proposals import Proposals
from dflash_trt.errors import EngineError
from dflash_trt.runtime.accept import accept_parts
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.policy.client_queue import ClientQueue, split_room, to_preempt
from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.policy.proposal_choice import ProposalChoice
from dflash_trt.runtime.policy.step_record import StepRecord
from dflash_trt.runtime.policy.step_share import StepShare
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.step_input import NO_PROPOSALS, StepInput

if TYPE_CHECKING:
    from dflash_trt.runtime.model_runner import ModelRunner


class Decoder:
    """Steps all requests it was given until each has finished."""

    def __init__(
        self, runner: ModelRunner, slots: SlotPool, draft_length: DraftLength, *,
        prefill_chunk: int = DEFAULTS.prefill_chunk,
    ) -> None:  # fmt: skip
        """Reads at most `prefill_chunk` prompt tokens in a step, so that a long prompt does not stall the others.

        The models' slots must be empty, and no other decoder may use them meanwhile.
        """
        self.slots = slots
        self.waiting = ClientQueue[Request]()
        """Requests without a slot: a large one is never overtaken for want of room, so it never starves."""
        self.running: dict[int, Request] = {}
        """Requests by slot, in the order of admission."""
        self.runner = runner
        self._draft_length = draft_length
        self._proposal_choice = ProposalChoice()
        self._step_share = StepShare()
        self._prefill_chunk = prefill_chunk
        self._totals, self._acceptance = DecoderTotals(), AcceptanceCounter()

    def step(self) -> None:
        """Advances all running requests by one pass of the target."""
        begin = time.perf_counter()
        self._admit()
        running = self._taking_part()
        blocks, chunks = self._draft(running), self._prompt_chunks(running)
        if not (parts := [*blocks, *chunks]):
            return
        logits = self.runner.verify([part.segment for part in parts])
        accepted = accept_parts(parts, logits)
        self._commit(parts, accepted)
        self._emit(parts, accepted)
        record = StepRecord(
            blocks=[block.record(tokens) for block, tokens in zip(blocks, accepted, strict=False) if tokens],
            num_prompt_tokens=sum(len(chunk.token_ids) for chunk in chunks),
            seconds=time.perf_counter() - begin,
        )
        self._draft_length.observe(record)
        self._proposal_choice.observe(record)
        self._step_share.observe(record)

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests while there is room, or while it is fair to make room."""
        while self._admit_one():
            pass

    def _admit_one(self) -> bool:
        """Admits a request, or takes a slot from another one; False if neither is possible before the next step."""
        running = [*self.running.values()]
        for request in self.waiting.heads(running):
            if not self.slots.has_room(request.max_length):
                if (other := to_preempt(running, request.client)) is not None:
                    self._preempt(other)
                return other is not None
            if not self.slots.is_computing(request.cacheable_ids):  # otherwise its prefix can soon be shared
                self._start(request)
                return True
        return False

    def _start(self, request: Request) -> None:
        self.waiting.take(request)
        context_ids = request.cacheable_ids
        slot, pages, num_cached = self.slots.allocate(request.max_length, context_ids)
        self.runner.reserve(slot, pages, num_cached)
        request.num_prefilled = num_cached
        if request.admitted is None:
            request.admitted, request.num_cached_tokens = time.perf_counter(), num_cached
        if self.slots.prefix_caching:
            self._totals.prefix_cache_queries += len(request.context_ids)
            self._totals.prefix_cache_hits += num_cached
        self.running[slot] = request

    def _preempt(self, request: Request) -> None:
        """Takes a request's slot; its next turn reads the tokens so far again, most of them from the prefix cache."""
        self._release(next(slot for slot, running in self.running.items() if running is request))
        request.restart()
        self.waiting.put_back(request)

    def _taking_part(self) -> Mapping[int, Request]:
        """Running requests of the clients that take part in the step."""
        clients = self._step_share.choose([request.client for request in self.running.values()])
        return {slot: request for slot, request in self.running.items() if request.client in clients}

    def _draft(self, running: Mapping[int, Request]) -> list[StepInput]:
        """Blocks: the last token of each request whose prompt has been read, and drafts that follow it."""
        decoding = {slot: request for slot, request in sorted(running.items()) if request.is_prefilled}
        chosen = self._draft_length.lengths([request.params.draft_length for request in decoding.values()])
        limits = {
            slot: min(length, request.remaining - 1)
            for (slot, request), length in zip(decoding.items(), chosen, strict=True)
        }
        open_limits = {slot: limit for slot, limit in limits.items() if limit > 0}
        forced = {
            slot: Proposals(ids, is_forced=True)
            for slot, limit in open_limits.items()
            if (ids := decoding[slot].forced(limit))
        }
        drafting = [slot for slot in open_limits if slot not in forced and self.runner.can_draft(slot)]
        drafted = forced | self._propose({slot: decoding[slot] for slot in drafting}, limits)
        return [
            StepInput.block(slot, request, self._cut(request, drafted.get(slot, NO_PROPOSALS).first(limits[slot])))
            for slot, request in decoding.items()
        ]

    def _propose(self, drafting: dict[int, Request], limits: dict[int, int]) -> dict[int, Proposals]:
        """The drafter's proposals by slot, greedy or drawn."""
        if not drafting:
            return {}
        anchors = [request.token_ids[-1] for request in drafting.values()]
        draws = [
            draw if (draw := request.draw) and self._proposal_choice.is_drawn(request.params.temperature) else None
            for request in drafting.values()
        ]
        proposals = self.runner.draft([*drafting], anchors, max(limits.values()), draws)
        return dict(zip(drafting, proposals, strict=True))

    def _cut(self, request: Request, proposals: Proposals) -> Proposals:
        """Leading proposals that are worth verifying; a request's own draft length is not cut."""
        if proposals.survival is None or request.params.draft_length is not None:
            return proposals
        return proposals.first(self._draft_length.cut_length(proposals.survival))

    def _prompt_chunks(self, running: Mapping[int, Request]) -> list[StepInput]:
        """The next tokens of unfinished prompts: an equal share for each client, its oldest request first."""
        reading = [(slot, request) for slot, request in running.items() if not request.is_prefilled]
        sizes = split_room(self._prefill_chunk, [(request.client, request.num_unread) for _, request in reading])
        return [StepInput.chunk(*each, size) for each, size in zip(reading, sizes, strict=True) if size]

    def _commit(self, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> None:
        """Rolls back what was rejected; the rest is in both caches, whose full pages others may share."""
        counts = [part.num_committed(tokens) for part, tokens in zip(parts, accepted, strict=True)]
        self.runner.commit(counts)
        for part, tokens, count in zip(parts, accepted, counts, strict=True):
            if not part.request.is_prefilled:
                part.request.num_prefilled += count
            if not part.has_failed(tokens):
                self.slots.append(part.slot, part.token_ids[:count])

    def _emit(self, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> None:
        """Appends new tokens to their requests and reports them; a request that ends leaves its slot."""
        self._totals.passes += 1
        for part, tokens in zip(parts, accepted, strict=True):
            request = part.request
            if part.has_failed(tokens):
                self._fail(part.slot, request)
            elif tokens:
                step = request.emit(tokens, part.drafted)
                self._totals.output_tokens += 1 if step is None else len(step.token_ids)  # the prefill has no step
                if step is not None:
                    self._acceptance.add(step)
                if request.finished is None:
                    request.report()
                else:
                    self._end(request, part.slot, request.finished)

    def add(self, request: Request) -> None:
        """Queues a request; it must fit the empty pool."""
        assert request.max_length <= self.slots.num_tokens, "a request that never fits would block the others"
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request between two steps, with what it has; one that has ended stays as it is."""
        if request.finished is not None:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        slot = next((slot for slot, running in self.running.items() if running is request), None)
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
        del self.runner

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
            draft_length=self._draft_length.explain(),
            acceptance=self._acceptance.read(),
            **msgspec.structs.asdict(self._totals) | {"finished": dict(self._totals.finished)},
        )

    def _fail(self, slot: int, request: Request) -> None:
        """Ends a request whose next logits are not finite; the others go on."""
        request.error = request.error or EngineError(
            f"the target's logits of output token {len(request.token_ids) + 1} are NaN or infinite",
            hint="look for NaN in the target's weights; download or copy them again",
        )
        self._end(request, slot, FinishReason.ERROR)

    def _end(self, request: Request, slot: int | None, reason: FinishReason) -> None:
        """Ends a request that has not ended yet, counts and reports it, and frees its slot."""
        if request.finished is None:
            request.finish(reason)
        self._totals.finished[reason] += 1
        if slot is not None:
            self._release(slot)
        request.report()

    def _release(self, slot: int) -> None:
        self.runner.release(slot)
        self.slots.free(slot)
        del self.running[slot]
