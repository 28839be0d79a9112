# SPDX-License-Identifier: Apache-2.0
"""The drafts of a step: whose, how many of them, greedy or drawn. On a GPU their pass runs while the host goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress

import msgspec

from dflash_trt import _C
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.policy.proposal_choice import ProposalChoice
from dflash_trt.runtime.policy.step_record import FreeBlock, StepRecord
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.step_input import NO_PROPOSALS, Batch, StepInput


class Drafts(msgspec.Struct):
    """Requests of a step whose prompts have been read, and the pass that drafts for them."""

    began: float
    """Time at which it was started."""
    requests: Mapping[int, Request]
    """Requests by slot, in the order of slots."""
    anchors: Sequence[int]
    """Last token of each request."""
    limits: Sequence[int]
    """Drafts that each request verifies at most."""
    proposals: dict[int, Proposals]
    """Proposals by slot that need no pass."""
    slots: Sequence[int]
    """Slots of the pass."""
    wait: Callable[[], list[Proposals]]
    """Waits for the proposals of `slots`."""


class Drafting:
    """Starts the pass of the drafter, and makes blocks of what it proposes."""

    def __init__(self, draft_length: DraftLength) -> None:
        self.draft_length = draft_length
        self._proposal_choice = ProposalChoice()

    def start(self, runner: ModelRunner, batch: Batch) -> Drafts:
        """Starts the pass for the requests that decode."""
        began, requests = time.perf_counter(), batch.decoding
        anchors, limits = _C.next_blocks(batch.answers, self.draft_length.lengths(batch.asked))
        forced = {
            slot: Proposals(ids, is_forced=True)
            for place, slot, request in batch.guided
            if limits[place] > 0 and (ids := request.forced(limits[place]))
        }
        slots = runner.draftable([*compress(requests, limits)])
        if forced:
            slots = [slot for slot in slots if slot not in forced]
        drafts = Drafts(began, requests, anchors, limits, forced, slots, list)
        if slots:
            drafting = anchors
            if len(slots) < len(requests):
                anchor_of = dict(zip(requests, anchors, strict=True))
                drafting = [anchor_of[slot] for slot in slots]
            draws = self._draws([requests[slot] for slot in slots]) if runner.draws_proposals else ()
            drafts.wait = runner.draft(slots, drafting, max(limits), draws)
        return drafts

    def blocks(self, drafts: Drafts) -> list[StepInput]:
        """A block of each request, once its drafts are there."""
        proposals = drafts.proposals | dict(zip(drafts.slots, drafts.wait(), strict=True))
        blocks = []
        of_request = zip(drafts.requests.items(), drafts.anchors, drafts.limits, strict=True)
        for (slot, request), anchor, limit in of_request:
            drafted = proposals.get(slot, NO_PROPOSALS)
            token_ids, _, _, survival, _ = drafted
            if len(token_ids) > limit or survival is not None:
                drafted = self._cut(request, drafted.first(limit))
                token_ids = drafted.token_ids
            blocks.append(StepInput(slot, [anchor, *token_ids], len(token_ids) + 1, request, drafted))
        return blocks

    def observe(self, record: StepRecord) -> None:
        """Tells the policies what a step did."""
        self.draft_length.observe(record)
        self._proposal_choice.observe(record)

    def _draws(self, requests: Sequence[Request]) -> list[Draw | None]:
        """Draws of the proposals of each request; None where they are greedy."""
        temperatures = {request.params.temperature for request in requests}
        drawn = {temperature: self._proposal_choice.is_drawn(temperature) for temperature in temperatures}
        return [request.draw if drawn[request.params.temperature] else None for request in requests]

    def _cut(self, request: Request, proposals: Proposals) -> Proposals:
        """Leading proposals that are worth verifying; a request's own draft length is not cut."""
        if proposals.survival is None or request.params.draft_length is not None:
            return proposals
        return proposals.first(self.draft_length.cut_length(proposals.survival))


def free_blocks(blocks: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> list[FreeBlock]:
    """Blocks with a token, and with drafts that could be greedy or drawn."""
    return [
        FreeBlock(block.request.params.temperature, block.drafted.candidate_ids is not None, len(tokens) - 1)
        for block, tokens in zip(blocks, accepted, strict=False)
        if tokens and block.request.draws_freely and block.drafted.token_ids and not block.drafted.is_forced
    ]
