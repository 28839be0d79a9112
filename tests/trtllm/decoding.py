# SPDX-License-Identifier: Apache-2.0
"""Decodes with a fixture target and the mimicked worker, beside our own drafter on the same context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.targets.target import Segment, Target
from tests.trtllm.worker import Worker


@dataclass
class Trace:
    """What a request came to."""

    token_ids: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    expected_drafts: list[list[int]] = field(default_factory=list)
    """By our own drafter, in the same state."""
    accepted: int = 0


class Decoding:
    """Requests on slots of the mimicked worker, which come, are prefilled in chunks, step together and go."""

    def __init__(self, worker: Worker, target: Target, drafter: Drafter) -> None:
        self.worker = worker
        self._target = target
        self._drafter = drafter
        self.traces: dict[int, Trace] = {}
        self._drafts: dict[int, list[int]] = {}
        self._prompts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def prefill(self, slot: int, part: list[int], shared_with: int | None = None) -> None:
        """A chunk of the prompt of the request on `slot`; after the last one, it may step.

        The worker need not store the first, where it is that of another slot.
        """
        verified = self._target.verify([Segment(slot=slot, token_ids=part, num_logits=1)], with_taps=True)
        self._target.rollback(slot, 0)
        if shared_with is None:
            self.worker.prefill(slot, verified.taps)
        else:
            self.worker.share(slot, shared_with, len(part))
        self._drafter.inject([slot], [len(part)], verified.taps)
        self._prompts[slot] = self._prompts.get(slot, []) + part
        self.traces[slot] = Trace([int(verified.logits[-1].argmax())])
        self._drafts[slot] = [0] * self.worker.K  # TensorRT-LLM's placeholders

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> None:
        """One step of the requests on `slots`, and of one that only pads the batch: graphs have fixed batch sizes."""
        width = self.worker.K + 1
        traces = [self.traces[slot] for slot in slots]
        drafts = torch.tensor([self._drafts[slot] for slot in slots])
        tokens = [[trace.token_ids[-1], *row] for trace, row in zip(traces, drafts.tolist(), strict=True)]
        segments = [
            Segment(slot=slot, token_ids=ids, num_logits=width) for slot, ids in zip(slots, tokens, strict=True)
        ]
        verified = self._target.verify(segments, with_taps=True)
        answers = verified.logits.argmax(dim=-1).view(len(slots), width)
        matches = (answers[:, :-1] == drafts).cumprod(dim=1).sum(dim=1)
        rows = zip(slots, traces, answers.tolist(), matches.tolist(), strict=True)
        for index, (slot, trace, row, matched) in enumerate(rows):
            trace.token_ids += row[: matched + 1]
            trace.accepted += matched
            self._target.rollback(slot, width - 1 - matched)
            begin = index * width
            self._drafter.inject([slot], [matched + 1], verified.taps[begin : begin + matched + 1])
        bonus = torch.tensor([trace.token_ids[-1] for trace in traces])
        one = torch.ones(1, dtype=torch.long)
        padded = torch.tensor([*slots, self.worker.dummy_slot])
        taps = torch.cat([verified.taps, verified.taps[:width]])
        found = self.worker.step(padded, taps, torch.cat([matches + 1, one]), torch.cat([bonus, one]))[:-1]
        expected = _own_drafts(self._drafter, self._target, list(slots), bonus)[:, : self.worker.K]
        for slot, trace, ours, theirs in zip(slots, traces, found.tolist(), expected.tolist(), strict=True):
            trace.drafts.append(ours)
            trace.expected_drafts.append(theirs)
            self._drafts[slot] = ours

    def evict(self, slot: int) -> None:
        """The request on `slot` loses its pages, and its prompt and answer are read again as one prompt."""
        trace, prompt = self.traces[slot], self._prompts[slot]
        self.release(slot)
        self.prefill(slot, prompt + trace.token_ids[:-1])
        assert self.traces[slot].token_ids == trace.token_ids[-1:]
        self._prompts[slot], self.traces[slot] = prompt, trace

    def release(self, slot: int) -> None:
        """The request on `slot` ends."""
        del self._prompts[slot]
        self.worker.release(slot)
        self._target.release(slot)
        self._drafter.release(slot)


def decode(
    worker: Worker, target: Target, drafter: Drafter, prompts: Sequence[list[int]], num_steps: int, *, chunk: int = 40
) -> list[Trace]:
    """`num_steps` steps of all prompts at once, one slot each, after prefills of `chunk` tokens."""
    decoding = Decoding(worker, target, drafter)
    slots = range(len(prompts))
    for slot, prompt in zip(slots, prompts, strict=True):
        for begin in range(0, len(prompt), chunk):
            decoding.prefill(slot, prompt[begin : begin + chunk])
    for _ in range(num_steps):
        decoding.step(slots)
    for slot in slots:
        decoding.release(slot)
    return list(decoding.traces.values())


def _own_drafts(drafter: Drafter, target: Target, slots: list[int], anchors: Tensor) -> Tensor:
    masks = torch.full((len(slots), drafter.spec.block_size - 1), drafter.spec.mask_token_id)
    noise = target.embed(torch.cat([anchors[:, None], masks], dim=1))
    if drafter.scorer is not None:
        return drafter.candidates(slots, noise, anchors, masks.shape[1], target.logits).greedy_walk()
    hidden = drafter.draft(slots, noise)
    return target.logits(hidden[:, 1:]).argmax(dim=-1)
