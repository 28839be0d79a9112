# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoints against modelopt 0.47's own export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.affine import read_int4
from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.weights import read_weights
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
    quantize_checkpoint(read_draft(source), load_recipe(recipe), tmp_path / "q", ranges=ranges, like_modelopt=True)
    actual = load_file(tmp_path / "q" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("name", ["INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT4_AWQ_CFG"])
def test_int4_as_it_is_exported(name: str, tmp_path: Path) -> None:
    """In groups of 128, with AWQ's pre_quant_scale or without: each value is the nearest to the dense weight.

    Model Optimizer cannot unpack this layout itself, and its simulation multiplies by reciprocals, which moves one code
    in a thousand. Its packer makes the exported bytes of the values that were read.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight

    torch.manual_seed(7)
    root = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
    rows = torch.randn(512, 256, dtype=torch.bfloat16)
    rows[:, 5] *= 30  # one column that AWQ scales
    weight = root[0].weight.detach().float().clone()
    mtq.quantize(root, getattr(mtq, name), lambda model: model(rows))
    factor = getattr(root[0].input_quantizer, "pre_quant_scale", None)
    assert (factor is not None) == (name == "INT4_AWQ_CFG")
    _export_quantized_weight(root[0], torch.bfloat16)
    tensors = {f"m.{key}": value.contiguous() for key, value in root[0].state_dict().items() if "quantizer" not in key}
    steps = tensors["m.weight_scale"].repeat_interleave(128, dim=1)
    if factor is not None:
        tensors["m.pre_quant_scale"] = factor.bfloat16()
        steps = steps * factor.float()
    save_file(tensors, tmp_path / "model.safetensors")
    dense, stored_as = read_int4(read_weights(tmp_path))
    assert stored_as.startswith("Model Optimizer's INT4, groups of 128: 1 layers")
    found = torch.from_numpy(as_float32(map_tensor(dense["m.weight"])))
    assert ((found - weight).abs() <= 0.5 * steps + 2**-6 * weight.abs().max()).all()  # AWQ scales and rounds in BF16
    assert (found - weight).abs().mean() < 0.3 * steps.mean()
    unscaled = found if factor is None else found / factor.float()
    assert torch.equal(pack_int4_in_uint8(unscaled, tensors["m.weight_scale"], 128), tensors["m.weight"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_golden_configurations_are_up_to_date(recipe: str, tmp_path: Path) -> None:
    layers = ["full_attention"] * 2
    source = write_random_draft(tmp_path, dialect="gpt_oss", layer_types=layers, sizes=WHOLE_BLOCKS)
    _, hf_quant_config, quantization_config = modelopt_export(source, recipe, unit_ranges(source))
    golden = json.loads((GOLDEN / f"{recipe}.json").read_text())
    assert golden == {"hf_quant_config": hf_quant_config, "quantization_config": quantization_config}
