# SPDX-License-Identifier: Apache-2.0
"""A LiLiCorr draft's loss and its gradients against float64 equations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.executor import CorrelatorInputs
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.recovery.correlator import Correlator
from dflash_trt.runtime.measure.recovery.objective import Example, Objective, read_objective
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft, trained_shapes
from tests.engine.graph.test_correlator import reference_of
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import Array, ReferenceDrafter, softmax
from tests.reference.lilicorr_float64 import ReferenceCorrelator
from tests.runtime.measure.recovery.test_objective import log_softmax, torch_draft

DRAFT = FIXTURES / "tiny-qwen3-lilicorr"
SPEC = read_draft(DRAFT).spec
K, TOP_K, SHARE = SPEC.num_draft_tokens, 8, 0.3
TRAINED = list(trained_shapes(SPEC))
RELATIVE = 2e-5
STEP = 1e-5
TEACHER = 1.05
"""Times each trained tensor: other scores, and now and then another order of candidates."""


Block = tuple[Array, Array, Array, list[int]]
"""hidden [K, H], log probabilities [K, V], context row [H] and true tokens of a block."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The equations, and what they read of one sequence."""

    drafter: ReferenceDrafter
    correlator: ReferenceCorrelator
    taps: Array
    anchors: list[int]
    blocks: Array
    tokens: list[int]
    head: Array
    embedding: Array

    def changed(self, change: Callable[[str, Array], Array]) -> Reference:
        """With other values of what is trained, by name without `.weight`."""
        tensors = {
            name: change(short, values) if (short := name.removesuffix(".weight")) in TRAINED else values
            for name, values in self.drafter.tensors.items()
        }
        own = {name.removeprefix("lilicorr."): values for name, values in tensors.items()}
        return replace(
            self, drafter=replace(self.drafter, tensors=tensors), correlator=replace(self.correlator, tensors=own)
        )

    def drafted(self) -> list[Block]:
        """The blocks at the anchors."""
        return [self._drafted(*block) for block in zip(self.anchors, self.blocks, strict=True)]

    def _drafted(self, anchor: int, block: Array) -> Block:
        taps = self.taps[:anchor]
        k, v = self.drafter.context_kv(taps, np.arange(anchor))
        rows = self.drafter.draft(block, k, v, np.arange(anchor, anchor + K + 1))[1:]
        log_probs = np.stack([log_softmax(row) for row in rows @ self.head.T])
        return rows, log_probs, self.drafter.context(taps[-1:])[0], self.tokens[anchor + 1 : anchor + 1 + K]

    def scores(self, block: Block, ids: Array) -> Array:
        """[K, k, k] of candidates [K, k], the best first."""
        hidden, log_probs, context, _ = block
        return self.correlator.scores(self.embedding[ids], np.take_along_axis(log_probs, ids, axis=-1), hidden, context)


def loss_of(student: Reference, blocks: list[Block], teacher: Reference, theirs: list[Block]) -> tuple[float, int]:
    """The weighted sum, and the slots in which the teacher has another order of the candidates."""
    loss, others = 0.0, 0
    for (hidden, log_probs, context, true), block in zip(blocks, theirs, strict=True):
        ids = np.argsort(-log_probs, axis=-1, kind="stable")[:, :TOP_K]
        order = np.argsort(-np.take_along_axis(block[1], ids, axis=-1), axis=-1, kind="stable")
        ranked = np.take_along_axis(ids, order, axis=-1)
        scores = student.scores((hidden, log_probs, context, true), ids)
        expected = teacher.scores(block, ranked)
        others += int((order != np.arange(TOP_K)).any(-1)[: len(true)].sum())
        place = teachers_place = 0
        reached = True
        for slot, token in enumerate(true):
            weight = math.exp(-slot / 4)
            loss += weight * mixed(log_probs[slot], block[1][slot], token)
            reached = reached and token in ids[slot]
            if reached:
                by_id = dict(zip(ranked[slot], expected[slot, teachers_place], strict=True))
                row, before = np.array([by_id[i] for i in ids[slot]]), place
                place, teachers_place = (x[slot].tolist().index(token) for x in (ids, ranked))
                loss += 0.5 * weight * mixed(scores[slot, before], row, place)
    return loss, others


def mixed(logits: Array, expected: Array, label: int) -> float:
    ours, theirs = log_softmax(logits), log_softmax(expected)
    return float(-(1 - SHARE) * ours[label] + SHARE * (softmax(expected) * (theirs - ours)).sum())


@dataclass(frozen=True)
class Setting:
    """The loss here, of one example, and the equations for it."""

    objective: Objective
    example: Example
    student: TorchDraft
    teacher: TorchDraft
    reference: Reference

    def loss(self) -> torch.Tensor:
        return self.objective.weighted_sum(self.student, self.example, self.teacher, SHARE)

    def expected(self) -> tuple[float, int]:
        teacher = self.reference.changed(lambda _, x: TEACHER * x)
        return loss_of(self.reference, self.reference.drafted(), teacher, teacher.drafted())


@pytest.fixture(scope="module")
def setting(features: dict[str, Path]) -> Setting:
    """Anchors at the answer's start, inside, and where the block leaves the answer."""
    draft = read_draft(DRAFT)
    with open_features(features["tiny-qwen3-lilicorr"], draft.spec) as file:
        objective, sequence = read_objective(draft, file), file.sequence(1)
        head, embedding = file.lm_head()[0].double().numpy(), file.embed_tokens().double().numpy()
    anchors = [sequence.prompt_length, sequence.prompt_length + 9, len(sequence.tokens) - 4]
    tokens = sequence.tokens.tolist()
    blocks = np.stack([embedding[[tokens[anchor], *[SPEC.mask_token_id] * K]] for anchor in anchors])
    student, teacher = torch_draft(DRAFT), torch_draft(DRAFT)
    teacher.weights = {name: TEACHER * value for name, value in teacher.weights.items()}
    reference = Reference(
        drafter=ReferenceDrafter.load(DRAFT), correlator=reference_of(DRAFT), taps=sequence.taps.double().numpy(),
        anchors=anchors, blocks=blocks, tokens=tokens, head=head, embedding=embedding,
    )  # fmt: skip
    return Setting(objective, (sequence, torch.tensor(anchors)), student, teacher, reference)


def test_the_loss_is_the_formula(setting: Setting) -> None:
    expected, others = setting.expected()
    assert setting.loss().item() == pytest.approx(expected, rel=RELATIVE)
    assert others > 0, "expected a teacher with another order of some candidates"


def test_gradients_are_those_of_the_equations(setting: Setting) -> None:
    """Each kind of tensor is moved in all layers, in a direction that is half its gradient and half random."""
    weights, reference = setting.student.weights, setting.reference
    for weight in weights.values():
        weight.requires_grad_()
    setting.loss().backward()  # type: ignore[no-untyped-call]
    random = np.random.default_rng(0)
    teacher = reference.changed(lambda _, x: TEACHER * x)
    ours, theirs = reference.drafted(), teacher.drafted()

    def loss_at(step: float, directions: dict[str, Array]) -> float:
        there = reference.changed(lambda name, x: x + step * directions[name] if name in directions else x)
        is_correlator = all(name.startswith("lilicorr.") for name in directions)
        return loss_of(there, ours if is_correlator else there.drafted(), teacher, theirs)[0]

    for kind in sorted(set(map(kind_of, weights))):
        names = [name for name in weights if kind_of(name) == kind]
        gradients = {name: weights[name].grad.double().numpy() for name in names}  # type: ignore[union-attr]
        directions = {name: unit(x) + unit(random.standard_normal(x.shape)) for name, x in gradients.items()}
        slope = (loss_at(STEP, directions) - loss_at(-STEP, directions)) / (2 * STEP)
        assert slope == pytest.approx(sum((gradients[n] * directions[n]).sum() for n in names), rel=2e-3), kind
    for weight in weights.values():
        weight.requires_grad_(False)


def kind_of(name: str) -> str:
    """The name without the layer."""
    return re.sub(r"\d+", "*", name)


def unit(x: Array) -> Array:
    length: Array = x / np.linalg.norm(x)
    return length


SCORES = Correlator.scores
Weights = Mapping[str, torch.Tensor]


def after_the_wrong_token(self: Correlator, weights: Weights, inputs: CorrelatorInputs) -> torch.Tensor:
    return SCORES(self, weights, inputs._replace(anchor_hidden=inputs.anchor_hidden.roll(1, 0)))


def slot_bias_reversed(self: Correlator, weights: Weights, inputs: CorrelatorInputs) -> torch.Tensor:
    name = "lilicorr.relative_slot_bias"
    return SCORES(self, {**weights, name: weights[name].flip(-1)}, inputs)


def left_out(_self: Correlator, _weights: Weights, inputs: CorrelatorInputs) -> torch.Tensor:
    return inputs.candidate_log_probs[:, :, None].expand(-1, -1, TOP_K, -1)


def among_the_candidates(self: Correlator, weights: Weights, inputs: CorrelatorInputs) -> torch.Tensor:
    return SCORES(self, weights, inputs._replace(candidate_log_probs=inputs.candidate_log_probs.log_softmax(-1)))


def previous_candidates(self: Correlator, weights: Weights, inputs: CorrelatorInputs) -> torch.Tensor:
    return SCORES(self, weights, inputs).mT


FAULTS: list[Any] = [
    after_the_wrong_token, slot_bias_reversed, left_out, among_the_candidates, previous_candidates,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_seen(fault: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Correlator, "scores", fault)
    assert setting.loss().item() != pytest.approx(setting.expected()[0], rel=20 * RELATIVE)
