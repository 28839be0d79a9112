# SPDX-License-Identifier: Apache-2.0
"""The loss against the paper's formula, slot by slot in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.runtime.measure.features import FeatureSequence, open_features
from dflash_trt.runtime.measure.recovery.objective import NOT_PROPOSED, Objective, Vocabulary, slot_weights
from tests.checkpoint.dialect_samples import write_mimo, write_speculators_vocabulary
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import Array, ReferenceDrafter
from tests.runtime.measure.recovery.test_torch_draft import torch_draft


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7), (10, 5), (8, 4), (13, 6), (4, 2), (32, 7)])
def test_slot_weights_are_the_papers(block_size: int, gamma: float) -> None:
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    np.testing.assert_allclose(slot_weights(block_size).numpy(), expected, rtol=1e-6)


def reference_logits(
    reference: ReferenceDrafter, sequence: FeatureSequence, anchor: int, head: Array, mask: Array
) -> Array:
    """[S, V] of the block at an anchor, from the definition."""
    S = 8
    k, v = reference.context_kv(sequence.taps[:anchor].double().numpy(), np.arange(anchor))
    first = sequence.embeddings[anchor - sequence.prompt_length].double().numpy()
    block = np.stack([first, *[mask] * (S - 1)])
    logits: Array = reference.draft(block, k, v, np.arange(anchor, anchor + S)) @ head.T
    return logits


def log_softmax(row: Array) -> Array:
    shifted: Array = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_the_loss_is_the_formula(features: dict[str, Path]) -> None:
    """Anchors at the answer's start, inside, and where the block leaves the answer; with a teacher and without."""
    source, share = FIXTURES / "tiny-gpt-oss-dflash", 0.3
    draft = read_draft(source)
    with open_features(features["tiny-gpt-oss"], draft.spec) as file:
        objective, sequence = Objective(Vocabulary(draft, file), draft.spec.block_size), file.sequence(1)
        head, mask = file.lm_head()[0].double().numpy(), file.mask_embedding().double().numpy()
    p, n = sequence.prompt_length, len(sequence.tokens)
    anchors = [p, p + 9, n - 4, n - 2]
    student, teacher = ReferenceDrafter.load(source), scaled(ReferenceDrafter.load(source))
    hard = soft = weight = 0.0
    for anchor in anchors:
        ours, theirs = (reference_logits(r, sequence, anchor, head, mask) for r in (student, teacher))
        for slot in range(1, min(8, n - anchor)):
            w = math.exp(-(slot - 1) / 4)
            log_p, log_q = log_softmax(ours[slot]), log_softmax(theirs[slot])
            hard -= w * log_p[int(sequence.tokens[anchor + slot])]
            soft += w * float((np.exp(log_q) * (log_q - log_p)).sum())
            weight += w
    example = sequence, torch.tensor(anchors)
    assert objective.total_weight([example]) == pytest.approx(weight, rel=1e-6)
    model, other = torch_draft(source), torch_draft(source)
    other.weights = {name: 1.5 * value for name, value in other.weights.items()}
    assert objective.weighted_sum(model, example).item() == pytest.approx(hard, rel=1e-5)
    mixed = objective.weighted_sum(model, example, other, share).item()
    assert mixed == pytest.approx((1 - share) * hard + share * soft, rel=1e-5)
    assert soft > 0.01 * hard


def scaled(reference: ReferenceDrafter) -> ReferenceDrafter:
    """Another draft: all matrices 1.5 times as large."""
    tensors = {name: 1.5 * values if values.ndim == 2 else values for name, values in reference.tensors.items()}
    return dataclasses.replace(reference, tensors=tensors)


def test_own_rows_and_head(tmp_path: Path, features: dict[str, Path]) -> None:
    """Draft that proposes 40 of 96 tokens and embeds them itself: labels are rows, other tokens teach nothing."""
    draft = read_draft(write_speculators_vocabulary(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    with open_features(features["tiny-gpt-oss"], read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec) as file:
        vocabulary = Vocabulary(draft, file)
    tokens = torch.arange(96)
    rows = vocabulary.labels(tokens)
    proposed = stored["d2t"] + torch.arange(40)
    assert rows[proposed].tolist() == list(range(40))
    assert (rows == NOT_PROPOSED).sum() == 56
    sequence = FeatureSequence(
        tokens=tokens, prompt_length=1, taps=torch.zeros(95, 144), embeddings=torch.zeros(95, 48)
    )
    table, mask = stored["embed_tokens.weight"].float(), draft.spec.mask_token_id
    anchors = torch.tensor([3, 90])
    expected = table[torch.tensor([[anchor, *[mask] * (draft.spec.block_size - 1)] for anchor in anchors.tolist()])]
    assert torch.equal(vocabulary.blocks(sequence, anchors), expected)
    hidden = torch.randn(2, 48)
    assert torch.allclose(vocabulary.logits(hidden), hidden @ stored["lm_head.weight"].float().T)
    weights = slot_weights(draft.spec.block_size)
    counted = [w for k, w in enumerate(weights.tolist(), start=1) if 3 + k in proposed.tolist()]
    assert 0 < len(counted) < len(weights)
    objective = Objective(vocabulary, draft.spec.block_size)
    assert objective.total_weight([(sequence, anchors[:1])]) == pytest.approx(sum(counted))


def test_own_mask_row(tmp_path: Path, features: dict[str, Path]) -> None:
    """MiMo's: one vector for the mask token, the target's rows for all others."""
    draft = read_draft(write_mimo(tmp_path))
    with open_features(features["tiny-gpt-oss"], read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec) as file:
        vocabulary = Vocabulary(draft, file)
    embeddings = torch.randn(9, 48)
    sequence = FeatureSequence(
        tokens=torch.arange(10), prompt_length=1, taps=torch.zeros(9, 144), embeddings=embeddings
    )
    block = vocabulary.blocks(sequence, torch.tensor([4]))[0]
    assert torch.equal(block[0], embeddings[3])
    assert torch.equal(
        block[1:], load_file(tmp_path / "mask_embedding.safetensors")["mask_embedding"].float().repeat(5, 1)
    )
