# SPDX-License-Identifier: Apache-2.0
"""What config.json and tensors of a DFlash2 draft must say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import BlockConv, DraftLayer, SelectorSizes
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import ranges_from_weights
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.reference.synthetic import write_random_draft


@pytest.fixture
def dflash2_dir(tmp_path: Path) -> Path:
    return write_random_draft(
        tmp_path / "draft", dialect="qwen3", layer_types=["sliding_attention"] * 3, sliding_window=9, is_causal=False,
        dflash2=True,
    )  # fmt: skip


def test_facts_and_tensors(dflash2_dir: Path) -> None:
    draft = read_draft(dflash2_dir)
    assert draft.spec.block_conv == BlockConv(kernel_size=2, group_size=8)
    assert draft.spec.candidate_selector == SelectorSizes(rank=12, top_k=5)
    assert set(draft.spec.layers) == {DraftLayer(sliding_window=9, causal=False)}
    assert draft.spec.block_size == 6
    assert len(draft.weights) == 15 * 3 + 6
    assert draft.weights["layers.0.mlp_conv.kernel_projection.weight"].shape == (2 * 2 * 48 // 8, 48)


@pytest.mark.parametrize("name", ["MiniMaxDFlash2DraftModel", "DFlash2BeamDraftModel", "DFlash2Qwen3ForCausalLM"])
def test_other_names_of_the_same(name: str, dflash2_dir: Path) -> None:
    assert read_draft(edit_config(dflash2_dir, architectures=[name])).spec.candidate_selector is not None


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_no_recipe_touches_convolution_and_selector(recipe: str, dflash2_dir: Path) -> None:
    algorithms = load_recipe(recipe).algorithms(read_draft(dflash2_dir).spec.linear_modules())
    assert algorithms
    assert not [name for name in algorithms if "conv" in name or "selector" in name]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dflash_config__conv_group_size": 7}, "conv_group_size: expected a divisor of hidden_size 48, found 7"),
        ({"dflash_config__conv_kernel_size": 0}, "conv_kernel_size: expected an integer from 1 to 16, found 0"),
        ({"dflash_config__selector_top_k": 97}, "selector_top_k: expected an integer from 1 to 96, found 97"),
        ({"dflash_config__selector_rank": None}, "selector_rank: expected an integer from 1 to 8192"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures: expected one of DFlash2DraftModel, "),
        ({"dflash_config__selector_rank": 13}, "predecessor_codebook': expected shape [96, 13], found [96, 12]"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, object], message: str, dflash2_dir: Path) -> None:
    edit_config(dflash2_dir, **changed)
    assert message in refusal(lambda: read_draft(dflash2_dir))


def test_a_missing_codebook_is_named(dflash2_dir: Path) -> None:
    edit_tensors(dflash2_dir, lambda tensors: tensors.pop("candidate_selector.successor_codebook"))
    message = "missing tensor 'candidate_selector.successor_codebook' [96, 12] (1 of 51 missing)"
    assert message in refusal(lambda: read_draft(dflash2_dir))


def test_weights_do_not_bound_convolved_activations(dflash2_dir: Path) -> None:
    draft = read_draft(dflash2_dir)
    with pytest.raises(CheckpointError, match="found block convolutions") as refused:
        ranges_from_weights(draft)
    assert "--calibration FEATURES" in str(refused.value.hint)
