# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints against modelopt 0.47's own export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.quantize.modelopt_export import GOLDEN, RECIPES, WHOLE_BLOCKS, modelopt_export, unit_ranges
from tests.reference.synthetic import write_random_draft

modelopt = pytest.importorskip("modelopt", reason="modelopt comes with dflash-trt[dev]")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dialect", ["gpt_oss", "qwen3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_same_tensors(recipe: str, dialect: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Same names, dtypes, shapes and bytes, given the same ranges and fused groups."""
    assert modelopt.__version__ == "0.47.0"
    layers = ["full_attention"] * 2
    source = write_random_draft(
        tmp_path / "draft", dialect=dialect, layer_types=layers, dtype=dtype, sizes=WHOLE_BLOCKS
    )
    ranges = unit_ranges(source)
    expected, _, _ = modelopt_export(source, recipe, ranges)
    quantize_checkpoint(read_draft(source), load_recipe(recipe), tmp_path / "q", ranges=ranges)
    actual = load_file(tmp_path / "q" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_golden_configurations_are_up_to_date(recipe: str, tmp_path: Path) -> None:
    layers = ["full_attention"] * 2
    source = write_random_draft(tmp_path, dialect="gpt_oss", layer_types=layers, sizes=WHOLE_BLOCKS)
    _, hf_quant_config, quantization_config = modelopt_export(source, recipe, unit_ranges(source))
    golden = json.loads((GOLDEN / f"{recipe}.json").read_text())
    assert golden == {"hf_quant_config": hf_quant_config, "quantization_config": quantization_config}
