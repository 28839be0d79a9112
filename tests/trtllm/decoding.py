# SPDX-License-Identifier: Apache-2.0
"""Decodes with a fixture target and the mimicked worker, beside our own drafter on the same context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_trt.drafter.drafter import Drafter
from dflash_trt.targets.target import Segment, Target
from tests.trtllm.worker import Worker


@dataclass
class Trace:
    """What a request came to."""

    token_ids: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    expected_drafts: list[list[int]] = field(default_factory=list)
    """By our own drafter, in the same state."""
    accepted: int = 0


@torch.inference_mode()
def decode(
    worker: Worker, target: Target, drafter: Drafter, prompts: Sequence[list[int]], num_steps: int, *, chunk: int = 40
) -> list[Trace]:
    """`num_steps` steps of all prompts at once, one slot each, after prefills of `chunk` tokens."""
    slots = list(range(len(prompts)))
    traces = []
    for slot, prompt in zip(slots, prompts, strict=True):
        for begin in range(0, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            verified = target.verify([Segment(slot=slot, token_ids=part, num_logits=1)], with_taps=True)
            target.rollback(slot, 0)
            worker.prefill(slot, verified.taps)
            drafter.inject([slot], [len(part)], verified.taps)
        traces.append(Trace([int(verified.logits[-1].argmax())]))
    drafts = torch.zeros(len(slots), worker.K, dtype=torch.long)
    for _ in range(num_steps):
        drafts = _step(worker, target, drafter, slots, traces, drafts)
    for slot in slots:
        target.release(slot)
        drafter.release(slot)
    return traces


def _step(
    worker: Worker, target: Target, drafter: Drafter, slots: list[int], traces: list[Trace], drafts: Tensor
) -> Tensor:
    width = worker.K + 1
    tokens = [[trace.token_ids[-1], *row] for trace, row in zip(traces, drafts.tolist(), strict=True)]
    segments = [Segment(slot=slot, token_ids=ids, num_logits=width) for slot, ids in zip(slots, tokens, strict=True)]
    verified = target.verify(segments, with_taps=True)
    answers = verified.logits.argmax(dim=-1).view(len(slots), width)
    matches = (answers[:, :-1] == drafts).cumprod(dim=1).sum(dim=1)
    for slot, trace, row, matched in zip(slots, traces, answers.tolist(), matches.tolist(), strict=True):
        trace.token_ids += row[: matched + 1]
        trace.accepted += matched
        target.rollback(slot, width - 1 - matched)
        drafter.inject([slot], [matched + 1], verified.taps[slot * width : slot * width + matched + 1])
    bonus = torch.tensor([trace.token_ids[-1] for trace in traces])
    # CUDA graphs have fixed batch sizes: the worker pads with requests on the dummy slot.
    padded = torch.tensor([*slots, worker.dummy_slot])
    taps = torch.cat([verified.taps, verified.taps[:width]])
    one = torch.ones(1, dtype=torch.long)
    found = worker.step(padded, taps, torch.cat([matches + 1, one]), torch.cat([bonus, one]))[:-1]
    expected = _own_drafts(drafter, target, slots, bonus)[:, : worker.K]
    for trace, ours, theirs in zip(traces, found.tolist(), expected.tolist(), strict=True):
        trace.drafts.append(ours)
        trace.expected_drafts.append(theirs)
    return found


def _own_drafts(drafter: Drafter, target: Target, slots: list[int], anchors: Tensor) -> Tensor:
    masks = torch.full((len(slots), drafter.spec.block_size - 1), drafter.spec.mask_token_id)
    hidden = drafter.draft(slots, target.embed(torch.cat([anchors[:, None], masks], dim=1)))
    return target.logits(hidden[:, 1:]).argmax(dim=-1)
