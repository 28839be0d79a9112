# SPDX-License-Identifier: Apache-2.0
"""The decode loop: admit, draft, verify, accept, commit, emit (DFlash, arXiv 2602.06036).

* admit: waiting requests take slots
* draft: one pass of the drafter proposes a block after the last token of each request
* verify: one pass of the target over all blocks, and over chunks of prompts that are still being read
* accept: proposals that the target would have emitted itself, and its own token after them
* commit: roll back what was rejected, inject what was accepted into the drafter's context
* emit: new tokens go out; requests that have ended leave their slots (a GPU makes the next step's drafts meanwhile)

Requests join and leave between steps, each at its own length (continuous batching: Orca, OSDI 2022). Decisions are made
in `policy/`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import msgspec

from dflash_trt import _C
from dflash_trt.api.acceptance import AcceptanceCounter
from dflash_trt.api.backend import DecoderMetrics, DecoderTotals
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.errors import EngineError
from dflash_trt.runtime.accept import accept_parts
from dflash_trt.runtime.drafting import Drafting, Drafts, free_blocks
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.policy.client_queue import ClientQueue, split_room, to_preempt
from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.policy.step_record import StepRecord
from dflash_trt.runtime.policy.step_share import StepShare
from dflash_trt.runtime.request import NAN_HINT, Request, append_all
from dflash_trt.runtime.step_input import Batch, StepInput

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
        self._drafting = Drafting(draft_length)
        self._batch: Batch | None = None
        """All running requests; None if one may have joined, left or changed."""
        self._drafts: Drafts | None = None
        """The next step's, if their pass runs already."""
        self._began = 0.0
        """Time at which the step's drafts were asked for."""
        self._step_share = StepShare()
        self._prefill_chunk = prefill_chunk
        self._totals, self._acceptance = DecoderTotals(), AcceptanceCounter()

    def step(self) -> None:
        """Advances all running requests by one pass of the target."""
        if self.waiting:
            self._admit()
        batch = self._taking_part()
        blocks, chunks = self._draft(batch), self._prompt_chunks(batch)
        if not (parts := [*blocks, *chunks]):
            return
        logits = self.runner.verify(parts)
        accepted = accept_parts(parts, logits)
        committed = self._commit(parts, chunks, accepted)
        self._observe(blocks, chunks, accepted)
        self._draft_ahead()
        self._count(parts, accepted)
        self._emit(parts, accepted, committed)

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests while there is room, or while it is fair to make room."""
        preempted = list[Request]()
        while self.waiting and self._admit_one(preempted):
            pass
        for request in preempted:  # not before, as a request that left a slot must not take it again
            self.waiting.put_back(request)

    def _admit_one(self, preempted: list[Request]) -> bool:
        """Admits a request, or takes a slot from another one; False if neither is possible before the next step."""
        running = [*self.running.values()]
        for request in self.waiting.heads(running):
            can_start = not self.slots.is_computing(request.cacheable_ids)  # otherwise its prefix can soon be shared
            if not self.slots.has_room(request.max_length):
                other = to_preempt(running, request.client) if can_start else None
                if other is not None:
                    self._preempt(other)
                    preempted.append(other)
                return other is not None
            if can_start:
                self._start(request)
                return True
        return False

    def _start(self, request: Request) -> None:
        self.waiting.take(request)
        context_ids = request.cacheable_ids
        slot, pages, num_cached = self.slots.allocate(request.max_length, context_ids)
        self.runner.reserve(slot, pages, num_cached)
        request.num_unread = len(request.context_ids) - num_cached
        if request.admitted is None:
            request.admitted, request.num_cached_tokens = time.perf_counter(), num_cached
        if self.slots.prefix_caching:
            self._totals.prefix_cache_queries += len(request.context_ids)
            self._totals.prefix_cache_hits += num_cached
        self.running[slot] = request
        self._batch = None

    def _preempt(self, request: Request) -> None:
        """Takes a request's slot; its next turn reads the tokens so far again, most of them from the prefix cache."""
        self._release(next(slot for slot, running in self.running.items() if running is request))
        request.restart()

    def _taking_part(self) -> Batch:
        """Running requests of the clients that take part in the step."""
        if self._batch is None:
            self._batch = Batch(self.running)
        chosen = self._step_share.choose(self._batch.clients)
        if chosen.issuperset(self._batch.clients):
            return self._batch
        return Batch({slot: request for slot, request in self.running.items() if request.client in chosen})

    def _draft(self, batch: Batch) -> list[StepInput]:
        """Blocks: the last token of each request whose prompt has been read, and drafts that follow it."""
        decoding = batch.decoding
        drafts, self._drafts = self._drafts, None
        if drafts is None or not decoding or not decoding.items() <= drafts.requests.items():
            drafts = self._drafting.start(self.runner, batch)
        self._began = drafts.began
        blocks = self._drafting.blocks(drafts)
        return blocks if len(blocks) == len(decoding) else [block for block in blocks if block.slot in decoding]

    def _draft_ahead(self) -> None:
        """Starts the next step's pass of the drafter, where the host goes on meanwhile."""
        if self.runner.drafts_ahead and (batch := self._taking_part()).decoding:
            self._drafts = self._drafting.start(self.runner, batch)

    def _prompt_chunks(self, batch: Batch) -> list[StepInput]:
        """The next tokens of unfinished prompts: an equal share for each client, its oldest request first."""
        if not batch.reading:
            return []
        unread = [(request.client, request.num_unread) for _, request in batch.reading]
        sizes = split_room(self._prefill_chunk, unread)
        return [StepInput.chunk(*each, size) for each, size in zip(batch.reading, sizes, strict=True) if size]

    def _commit(self, parts: Sequence[StepInput], chunks: Sequence[StepInput], accepted: list[list[int]]) -> list[int]:
        """Rolls back rejected proposals and lengthens the answers; returns how many tokens of each part are context."""
        num_blocks = len(parts) - len(chunks)
        committed = [len(tokens) or 1 for tokens in accepted[:num_blocks]]
        committed += [len(chunk.token_ids) for chunk in chunks]
        self.runner.commit(committed)
        for chunk in chunks:
            chunk.request.num_unread -= len(chunk.token_ids)
        if not all(accepted):  # chunks inside a prompt emit nothing
            emit = [part.num_drawn for part in parts]
            parts, accepted = [*compress(parts, emit)], [*compress(accepted, emit)]
        requests, drafted = [part.request for part in parts], [part.drafted for part in parts]
        if append_all(requests, drafted, accepted, time.perf_counter()) or chunks:
            self._batch = None
        return committed

    def _observe(self, blocks: Sequence[StepInput], chunks: Sequence[StepInput], accepted: list[list[int]]) -> None:
        """Tells the policies what the step did, but for blocks without a token, and what it cost."""
        num_proposed, num_accepted = _C.draft_counts([block.drafted for block in blocks], accepted)
        record = StepRecord(
            proposed=num_proposed,
            accepted=num_accepted,
            free=free_blocks(blocks, accepted) if self.runner.draws_proposals else (),
            num_prompt_tokens=sum(len(chunk.token_ids) for chunk in chunks),
            seconds=time.perf_counter() - self._began,
        )
        self._drafting.observe(record)
        self._step_share.observe(record)

    def _count(self, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> None:
        """Adds to the totals; the pass that emits the first token of an answer is none of drafts."""
        answers = [part.request.answer for part in compress(parts, accepted)]
        num_tokens, verified = _C.last_passes(answers)
        self._totals.passes += 1
        self._totals.output_tokens += num_tokens
        self._acceptance.add(verified)

    def _emit(self, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]], committed: Sequence[int]) -> None:
        """Reports new tokens; a request that ends leaves its slot, and others may share its full pages."""
        shares_pages = self.slots.prefix_caching
        for part, tokens, count in zip(parts, accepted, committed, strict=True):
            request = part.request
            if shares_pages and (tokens or not part.num_drawn):  # without a token, logits were not finite
                self.slots.append(part.slot, part.token_ids[:count])
            if request.ending is not None:
                self._end(request, part.slot, request.ending)
            elif tokens and request.on_progress is not None:
                request.on_progress(request)

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
        self._batch = None
        self._drafts = None
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
            draft_length=self._drafting.draft_length.explain(),
            acceptance=self._acceptance.read(),
            **msgspec.structs.asdict(self._totals) | {"finished": dict(self._totals.finished)},
        )

    def _end(self, request: Request, slot: int | None, reason: FinishReason) -> None:
        """Ends a request that has not ended yet, counts and reports it, and frees its slot; the others go on."""
        if reason is FinishReason.ERROR:
            request.error = request.error or EngineError(
                f"the target's logits of output token {len(request.answer) + 1} are NaN or infinite",
                hint=NAN_HINT,
            )
        self._totals.finished[request.finish(reason)] += 1
        if slot is not None:
            self._release(slot)
        request.report()

    def _release(self, slot: int) -> None:
        self.runner.release(slot)
        self.slots.free(slot)
        del self.running[slot]
        self._batch = None
        if not self.running:
            self._drafts = None  # cancelled requests may have left some
