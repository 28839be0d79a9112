# SPDX-License-Identifier: Apache-2.0
"""The loss against the paper's formula, slot by slot in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.quantize.features import FeatureSequence, open_features
from dflash_trt.quantize.recovery.objective import Objective, random_anchors, slot_weights
from tests.paths import FIXTURES
from tests.quantize.recovery.test_torch_draft import torch_draft
from tests.reference.dflash_float64 import Array, ReferenceDrafter


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (13, 6), (4, 2), (32, 7)])
def test_slot_weights_are_the_papers(block_size: int, gamma: float) -> None:
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    np.testing.assert_allclose(slot_weights(block_size).numpy(), expected, rtol=1e-6)


def expected_loss(
    reference: ReferenceDrafter, sequence: FeatureSequence, anchors: list[int], head: Array, mask: Array, S: int
) -> tuple[float, float]:
    """The weighted sum and the sum of weights, from the definition."""
    total = weight = 0.0
    for anchor in anchors:
        k, v = reference.context_kv(sequence.taps[:anchor].double().numpy(), np.arange(anchor))
        first = sequence.embeddings[anchor - sequence.prompt_length].double().numpy()
        block = np.stack([first, *[mask] * (S - 1)])
        logits = reference.draft(block, k, v, np.arange(anchor, anchor + S)) @ head.T
        for slot in range(1, min(S, len(sequence.tokens) - anchor)):
            w = math.exp(-(slot - 1) / 4)
            row = logits[slot]
            label = int(sequence.tokens[anchor + slot])
            total += w * float(row.max() + np.log(np.exp(row - row.max()).sum()) - row[label])
            weight += w
    return total, weight


def test_the_loss_is_the_formula(features: dict[str, Path]) -> None:
    """Anchors at the answer's start, inside, and where the block leaves the answer."""
    source = FIXTURES / "tiny-gpt-oss-dflash"
    spec = read_draft(source).spec
    with open_features(features["tiny-gpt-oss"], spec) as file:
        objective, sequence = Objective(spec, file), file.sequence(1)
        head, mask = file.lm_head()[0].double().numpy(), file.mask_embedding().double().numpy()
    p, n = sequence.prompt_length, len(sequence.tokens)
    anchors = [p, p + 9, n - 4, n - 2]
    example = sequence, torch.tensor(anchors)
    total, weight = expected_loss(ReferenceDrafter.load(source), sequence, anchors, head, mask, spec.block_size)
    assert objective.total_weight([example]) == pytest.approx(weight, rel=1e-6)
    assert objective.weighted_sum(torch_draft(source), example).item() == pytest.approx(total, rel=1e-5)


def test_anchors_are_random_tokens_of_the_answer() -> None:
    drawn = [random_anchors(5, 12, 3, np.random.default_rng([0, step])).tolist() for step in range(60)]
    assert all(anchors == sorted(set(anchors)) and len(anchors) == 3 for anchors in drawn)
    assert {anchor for anchors in drawn for anchor in anchors} == set(range(5, 11))
    assert random_anchors(5, 7, 3, np.random.default_rng(0)).tolist() == [5]
