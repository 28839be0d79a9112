# SPDX-License-Identifier: Apache-2.0
"""The draft that is trained against the equations and packed graphs, and its loss against the paper's formula."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.measure.features import FeatureSequence, open_features
from dflash_trt.runtime.measure.recovery.fake_quantization import quantised_weights, recipe_numerics
from dflash_trt.runtime.measure.recovery.objective import NOT_PROPOSED, Objective, Vocabulary, slot_weights
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft, computed_tensors, trained_shapes
from tests.checkpoint.dialect_samples import WRITERS, write_mimo, write_speculators_vocabulary
from tests.engine.graph.test_features import CASES as FEATURES
from tests.engine.graph.test_features import Case
from tests.engines import Graphs, build
from tests.featured import featured_draft
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import Array, ReferenceDrafter
from tests.reference.synthetic import write_random_draft

RELATIVE = 1e-5
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"dialect": "gpt_oss"},
    "float16": {"dialect": "qwen3", "dtype": torch.float16},
    "window": {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": 7, "is_causal": False},
    "causal": {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": 7, "is_causal": True},
    "convolved": {"dialect": "qwen3", "lilicorr": "convolved"},
    "mixed": {"dialect": "gpt_oss", "layer_types": SLIDING, "sliding_window": 7},
}


def torch_draft(checkpoint: Path, recipe: str = "bf16") -> TorchDraft:
    return torch_draft_of(read_draft(checkpoint), recipe)


def ranges_of(draft: DraftCheckpoint) -> Ranges:
    """Bounds from the weights; of a draft with convolutions, those of its sibling without."""
    return ranges_from_weights(draft if draft.spec.block_conv is None else read_draft(FIXTURES / "tiny-qwen3-dflash"))


def torch_draft_of(draft: DraftCheckpoint, recipe: str = "bf16") -> TorchDraft:
    chosen, tensors = load_recipe(recipe), computed_tensors(draft)
    numerics = recipe_numerics(draft.spec, chosen, ranges_of(draft) if chosen.needs_ranges else None)
    model = TorchDraft(draft.spec, numerics, tensors)
    given = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    dense = {name: given[name] for name in trained_shapes(draft.spec)}
    model.weights = quantised_weights(draft.spec, numerics, dense)
    return model


@pytest.mark.parametrize("case", CASES)
def test_dense_equals_the_equations(case: str, tmp_path: Path) -> None:
    checkpoint = write_random_draft(tmp_path, **CASES[case])
    assert_equals_the_equations(read_draft(checkpoint), ReferenceDrafter.load(checkpoint))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FEATURES])
def test_every_feature_equals_the_equations(case: Case, tmp_path: Path) -> None:
    """Gates, sinks, partial rotary and all else that some dialect's drafts have."""
    base = write_random_draft(tmp_path / "base", dialect=case.dialect)
    draft = featured_draft(base, tmp_path / "draft", case.facts)
    assert_equals_the_equations(draft, ReferenceDrafter.load(tmp_path / "draft", case.reference))


def assert_equals_the_equations(draft: DraftCheckpoint, reference: ReferenceDrafter) -> None:
    """Several blocks of one sequence in one pass, each as the equations have it alone."""
    model, spec = torch_draft_of(draft), draft.spec
    random = np.random.default_rng(1)
    taps = random.standard_normal((40, spec.target_hidden_size)) * ([300] + [1] * (spec.target_hidden_size - 1))
    anchors = [0, 1, 7, 12, 40]
    noise = random.standard_normal((len(anchors), spec.block_size, spec.hidden_size))
    context = model.context(torch.from_numpy(taps))
    hidden = model.blocks(torch.from_numpy(noise), torch.tensor(anchors), context)
    k, v = reference.context_kv(taps, np.arange(40))
    for layer in range(len(spec.layers)):
        np.testing.assert_allclose(context.k[layer].numpy(), k[:, layer], atol=RELATIVE * np.abs(k).max(), rtol=0)
        np.testing.assert_allclose(context.v[layer].numpy(), v[:, layer], atol=RELATIVE * np.abs(v).max(), rtol=0)
    for found, block, anchor in zip(hidden.numpy(), noise, anchors, strict=True):
        expected = reference.draft(block, k[:anchor], v[:anchor], np.arange(anchor, anchor + spec.block_size))
        np.testing.assert_allclose(found, expected, atol=2 * RELATIVE * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("tiny-gpt-oss-dflash", "nvfp4+fp8-kv"), ("tiny-qwen3-dflash", "fp8"), ("tiny-qwen3-lilicorr", "nvfp4")],
)
def test_quantised_equals_the_graphs_of_what_is_packed(
    name: str, recipe: str, tmp_path: Path, features: dict[str, Path]
) -> None:
    source, anchors = FIXTURES / name, [8, 14, 20, 26, 31]
    draft = read_draft(source)
    quantize_checkpoint(draft, load_recipe(recipe), tmp_path / "q", ranges=ranges_of(draft))
    build(tmp_path / "q", tmp_path / "engine")
    graphs, model = Graphs(tmp_path / "engine"), torch_draft(source, recipe)
    with open_features(features[name.removesuffix("-dflash")], draft.spec) as file:
        taps, mask = file.sequence(0).taps.float(), file.mask_embedding().float()
    noise = mask.repeat(len(anchors), draft.spec.block_size, 1)
    context = model.context(taps)
    found = model.blocks(noise, torch.tensor(anchors), context).numpy()
    k, v = graphs.context(taps.numpy(), np.arange(len(taps)))
    caches = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
    expected = np.concatenate([graphs.draft(noise.numpy()[:1], caches, [0], [anchor]) for anchor in anchors])
    for layer, (ours_k, ours_v) in enumerate(zip(context.k, context.v, strict=True)):
        assert relative_error(ours_k.numpy(), k[:, layer]) < 0.003
        assert relative_error(ours_v.numpy(), v[:, layer]) < 0.003
    assert median_error(found, expected) < 0.001  # sums in another order flip a code now and then, in some block
    dense = torch_draft(source)
    assert median_error(dense.blocks(noise, torch.tensor(anchors), dense.context(taps)).numpy(), expected) > 0.02


@pytest.mark.parametrize(
    ("dialect", "recipe"),
    [("laguna", "nvfp4"), pytest.param("mimo", "nvfp4+fp8-kv", marks=pytest.mark.full), ("mimo", "fp8+fp8-kv")],
)
def test_dialects_equal_the_graphs_of_what_is_packed(dialect: str, recipe: str, tmp_path: Path) -> None:
    """Gates with an input scale of their own, k and v a layer, sinks, values scaled before they are cached."""
    draft = read_draft(WRITERS[dialect](tmp_path / "draft"))
    quantize_checkpoint(draft, load_recipe(recipe), tmp_path / "q")
    build(tmp_path / "q", tmp_path / "engine")
    graphs, model, spec = Graphs(tmp_path / "engine"), torch_draft_of(draft, recipe), draft.spec
    random = np.random.default_rng(2)
    taps = random.standard_normal((12, spec.target_hidden_size)).astype(np.float32)
    noise = random.standard_normal((2, spec.block_size, spec.hidden_size)).astype(np.float32)
    context = model.context(torch.from_numpy(taps))
    found = model.blocks(torch.from_numpy(noise), torch.tensor([5, 12]), context).numpy()
    k, v = graphs.context(taps, np.arange(12))
    caches = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
    assert relative_error(found, graphs.draft(noise, caches, [0, 0], [5, 12])) < 0.02
    dense = torch_draft_of(draft).blocks(torch.from_numpy(noise), torch.tensor([5, 12]), context).numpy()
    assert relative_error(found, dense) > 0.05


def median_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.median([relative_error(*blocks) for blocks in zip(actual, expected, strict=True)]))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


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
