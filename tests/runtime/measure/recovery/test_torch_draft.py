# SPDX-License-Identifier: Apache-2.0
"""The draft in PyTorch: dense against the float64 equations, quantised against the graphs of what is packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.quantize.bounds import ranges_from_weights
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.recovery.fake_quantization import quantised_weights, recipe_numerics
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft, computed_tensors
from tests.checkpoint.dialect_samples import WRITERS
from tests.engine.graph.test_features import CASES as FEATURES
from tests.engine.graph.test_features import Case
from tests.engines import Graphs, build
from tests.featured import featured_draft
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import ReferenceDrafter
from tests.reference.synthetic import write_random_draft

RELATIVE = 1e-5
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"dialect": "gpt_oss"},
    "float16": {"dialect": "qwen3", "dtype": torch.float16},
    "window": {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": 7, "is_causal": False},
    "causal": {"dialect": "qwen3", "layer_types": SLIDING, "sliding_window": 7, "is_causal": True},
    "mixed": {"dialect": "gpt_oss", "layer_types": SLIDING, "sliding_window": 7},
}


def torch_draft(checkpoint: Path, recipe: str = "bf16") -> TorchDraft:
    return torch_draft_of(read_draft(checkpoint), recipe)


def torch_draft_of(draft: DraftCheckpoint, recipe: str = "bf16") -> TorchDraft:
    chosen, tensors = load_recipe(recipe), computed_tensors(draft)
    ranges = ranges_from_weights(draft) if chosen.needs_ranges(draft.spec.linear_modules()) else None
    numerics = recipe_numerics(draft.spec, chosen, ranges)
    model = TorchDraft(draft.spec, numerics, tensors)
    dense = {module: tensors[f"{module}.weight"] for module in draft.spec.linear_modules()}
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
    [("tiny-gpt-oss", "nvfp4+fp8-kv"), ("tiny-gpt-oss", "mixed-nvfp4-fp8"), ("tiny-qwen3", "fp8")],
)
def test_quantised_equals_the_graphs_of_what_is_packed(
    name: str, recipe: str, tmp_path: Path, features: dict[str, Path]
) -> None:
    source, anchors = FIXTURES / f"{name}-dflash", [8, 14, 20, 26, 31]
    draft = read_draft(source)
    quantize_checkpoint(draft, load_recipe(recipe), tmp_path / "q")
    build(tmp_path / "q", tmp_path / "engine")
    graphs, model = Graphs(tmp_path / "engine"), torch_draft(source, recipe)
    with open_features(features[name], draft.spec) as file:
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
