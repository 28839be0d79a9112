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
from collections.abc import Mapping, Sequence
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
from dflash_trt.runtime.request import Request, append_all
from dflash_trt.runtime.step_input import StepInput

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
        running = self._taking_part()
        blocks, chunks = self._draft(running), self._prompt_chunks(running)
        if not (parts := [*blocks, *chunks]):
            return
        logits = self.runner.verify(parts)
        accepted = accept_parts(parts, logits)
        self._commit(parts, chunks, accepted)
        self._observe(blocks, chunks, accepted)
        self._draft_ahead()
        self._count(parts, accepted)
        self._emit(parts, accepted)

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

    def _preempt(self, request: Request) -> None:
        """Takes a request's slot; its next turn reads the tokens so far again, most of them from the prefix cache."""
        self._release(next(slot for slot, running in self.running.items() if running is request))
        request.restart()

    def _taking_part(self) -> Mapping[int, Request]:
        """Running requests of the clients that take part in the step."""
        clients = [request.client for request in self.running.values()]
        chosen = self._step_share.choose(clients)
        if chosen.issuperset(clients):
            return self.running
        return {slot: request for slot, request in self.running.items() if request.client in chosen}

    def _draft(self, running: Mapping[int, Request]) -> list[StepInput]:
        """Blocks: the last token of each request whose prompt has been read, and drafts that follow it."""
        decoding = _decoding(running)
        drafts, self._drafts = self._drafts, None
        if drafts is None or not decoding or not decoding.items() <= drafts.requests.items():
            drafts = self._drafting.start(self.runner, decoding)
        self._began = drafts.began
        blocks = self._drafting.blocks(drafts)
        return blocks if len(blocks) == len(decoding) else [block for block in blocks if block.slot in decoding]

    def _draft_ahead(self) -> None:
        """Starts the next step's pass of the drafter, where the host goes on meanwhile."""
        if self.runner.drafts_ahead and (decoding := _decoding(self._taking_part())):
            self._drafts = self._drafting.start(self.runner, decoding)

    def _prompt_chunks(self, running: Mapping[int, Request]) -> list[StepInput]:
        """The next tokens of unfinished prompts: an equal share for each client, its oldest request first."""
        reading = [each for each in running.items() if each[1].num_unread]
        if not reading:
            return []
        sizes = split_room(self._prefill_chunk, [(request.client, request.num_unread) for _, request in reading])
        return [StepInput.chunk(*each, size) for each, size in zip(reading, sizes, strict=True) if size]

    def _commit(self, parts: Sequence[StepInput], chunks: Sequence[StepInput], accepted: list[list[int]]) -> None:
        """Rolls back what was rejected; the rest is in both caches, and in the answers up to a token that ends them."""
        self.runner.commit([part.num_committed(tokens) for part, tokens in zip(parts, accepted, strict=True)])
        for chunk in chunks:
            chunk.request.num_unread -= len(chunk.token_ids)
        if not all(accepted):  # chunks inside a prompt emit nothing
            emit = [part.num_drawn for part in parts]
            parts, accepted = [*compress(parts, emit)], [*compress(accepted, emit)]
        requests, drafted = [part.request for part in parts], [part.drafted for part in parts]
        append_all(requests, drafted, accepted, time.perf_counter())

    def _observe(
        self, blocks: Sequence[StepInput], chunks: Sequence[StepInput], accepted: Sequence[Sequence[int]]
    ) -> None:
        """Tells the policies what the step did, but for blocks without a token, and what it cost."""
        drafted = [(block.drafted, tokens) for block, tokens in zip(blocks, accepted, strict=False) if tokens]
        record = StepRecord(
            proposed=[0 if drafts.is_forced else len(drafts.token_ids) for drafts, _ in drafted],
            accepted=[0 if drafts.is_forced else len(tokens) - 1 for drafts, tokens in drafted],
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

    def _emit(self, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> None:
        """Reports new tokens; a request that ends leaves its slot, and others may share its full pages."""
        for part, tokens in zip(parts, accepted, strict=True):
            request = part.request
            if request.ending is FinishReason.ERROR:
                self._fail(part.slot, request)
                continue
            if self.slots.prefix_caching:
                self.slots.append(part.slot, part.token_ids[: part.num_committed(tokens)])
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

    def _fail(self, slot: int, request: Request) -> None:
        """Ends a request whose next logits are not finite; the others go on."""
        request.error = request.error or EngineError(
            f"the target's logits of output token {len(request.answer) + 1} are NaN or infinite",
            hint="look for NaN in the target's weights; download or copy them again",
        )
        self._end(request, slot, FinishReason.ERROR)

    def _end(self, request: Request, slot: int | None, reason: FinishReason) -> None:
        """Ends a request that has not ended yet, counts and reports it, and frees its slot."""
        self._totals.finished[request.finish(reason)] += 1
        if slot is not None:
            self._release(slot)
        request.report()

    def _release(self, slot: int) -> None:
        self.runner.release(slot)
        self.slots.free(slot)
        del self.running[slot]
        if not self.running:
            self._drafts = None  # cancelled requests may have left some


def _decoding(running: Mapping[int, Request]) -> dict[int, Request]:
    """Requests whose prompts have been read and whose answers go on, by slot, in the order of slots."""
    return {
        slot: request
        for slot in sorted(running)
        if not (request := running[slot]).num_unread and request.ending is None
    }
