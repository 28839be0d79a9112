# SPDX-License-Identifier: Apache-2.0
"""What a decode loop may ask of a pair, in a fixed order: ragged passes, partial commits, a slot used again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.model_runner import LocalRunner, ModelRunner
from dflash_trt.runtime.ranks.parallel_runner import rank_facts
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.sharding import sharding
from dflash_trt.runtime.targets.target import Segment

NUM_SLOTS = 4
PROMPTS = {0: range(40, 130), 1: range(300, 307), 3: range(200, 233)}
"""Longer than the sliding window, shorter than a block, between the two; slot 2 stays empty."""


def load_pairs(engine: Path, target: Path, ranks: Leader | Follower) -> tuple[list[LocalRunner], float]:
    """This rank's pair, and the same target without a drafter; which share of the target's weights it holds."""
    manifest = read_manifest(engine)
    checkpoint = read_target(target)
    ranks.verify_same_facts(rank_facts(engine, checkpoint))
    taps = manifest.draft.target_layer_ids
    options = {"distributed_config": sharding(target, ranks.size)} if ranks.size > 1 else {}
    model = load_model(target, checkpoint.spec, taps, **options)
    shared = make_target(model, taps, NUM_SLOTS, accelerate)
    pairs = [LocalRunner(shared, open_drafter(engine, manifest, num_slots=NUM_SLOTS)), LocalRunner(shared, None)]
    return pairs, _share(model)


def run_script(pair: ModelRunner, plain: ModelRunner) -> dict[str, torch.Tensor]:
    """Every answer of the pairs, by name."""
    answers: dict[str, torch.Tensor] = {}
    last = _prefill(pair, answers)
    for step in range(3):
        slots = sorted(last)
        proposals = [drafted.token_ids for drafted in pair.draft(slots, [last[slot] for slot in slots], 7)]
        answers[f"proposals {step}"] = torch.tensor(proposals)
        drafts = dict(zip(slots, proposals, strict=True))
        # Each slot verifies another number of proposals, and commits another number of tokens.
        lengths = {slot: (slot + step) % 4 + 1 for slot in slots}
        segments = [segment(slot, [last[slot], *drafts[slot][: lengths[slot]]]) for slot in slots]
        logits = answers[f"logits {step}"] = pair.verify(segments).clone()
        kept = [1 + (slot + 2 * step) % lengths[slot] for slot in slots]
        pair.commit(kept)
        begin = 0
        for slot, count in zip(slots, kept, strict=True):
            last[slot] = int(logits[begin + count - 1].argmax())
            begin += lengths[slot] + 1
    _use_a_slot_again(pair, plain, answers)
    return answers


def _share(model: nn.Module) -> float:
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return here / sum(p.numel() for p in model.parameters())


def segment(slot: int, token_ids: Sequence[int], num_logits: int | None = None) -> Segment:
    """A segment that by default asks for all logits."""
    return Segment(slot=slot, token_ids=token_ids, num_logits=len(token_ids) if num_logits is None else num_logits)


def _prefill(pair: ModelRunner, answers: dict[str, torch.Tensor]) -> dict[int, int]:
    """Slot 0 in two chunks, the others beside its second; the token behind each prompt."""
    first, second = PROMPTS[0][:64], PROMPTS[0][64:]
    answers["no logits"] = pair.verify([segment(0, first, 0)]).clone()
    pair.commit([len(first)])
    parts = {0: second, 1: PROMPTS[1], 3: PROMPTS[3]}
    logits = answers["prefill"] = pair.verify([segment(slot, part, 1) for slot, part in parts.items()]).clone()
    pair.commit([len(part) for part in parts.values()])
    return dict(zip(parts, logits.argmax(dim=-1).tolist(), strict=True))


def _use_a_slot_again(pair: ModelRunner, plain: ModelRunner, answers: dict[str, torch.Tensor]) -> None:
    pair.release(3)
    answers["slot 3 again"] = pair.verify([segment(3, range(500, 520), 1)]).clone()
    pair.commit([20])
    answers["proposals again"] = torch.tensor(pair.draft([3], [7], 7)[0].token_ids)
    for slot in PROMPTS:
        pair.release(slot)
    answers["plain"] = plain.verify([segment(1, PROMPTS[1])]).clone()
    plain.commit([len(PROMPTS[1])])
    plain.release(1)
    _share_a_page(pair, answers)


def _share_a_page(pair: ModelRunner, answers: dict[str, torch.Tensor]) -> None:
    """Slot 1 begins with the page that slot 2 has filled, in both caches."""
    prompt = range(600, 640)
    pair.reserve(2, [9, 4], 0)
    answers["filled"] = pair.verify([segment(2, prompt, 1)]).clone()
    pair.commit([len(prompt)])
    pair.catch_up()
    assert pair.num_written(2) == len(prompt)
    pair.release(2)
    pair.reserve(1, [9, 7], 32)
    answers["found"] = pair.verify([segment(1, prompt[32:], 1)]).clone()
    pair.commit([len(prompt) - 32])
    torch.testing.assert_close(answers["found"], answers["filled"], rtol=0, atol=1e-4)
    answers["proposals found"] = torch.tensor(pair.draft([1], [7], 5)[0].token_ids)
    pair.release(1)
