# SPDX-License-Identifier: Apache-2.0
"""Every number format of the table has a packer, is recognised from its tensors, and has nodes in the graphs."""

from pathlib import Path

import onnx
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.number_formats import FORMATS
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.engines import build
from tests.paths import FIXTURES

DRAFT = FIXTURES / "tiny-qwen3-dflash"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_packed_recognised_and_in_the_graphs(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"  # nothing bounds the input of fc
    rules = f"  - {{modules: fc, algorithm: none}}\n  - {{modules: '*', algorithm: {name}}}\n"
    recipe.write_text(f"description: one format\nrules:\n{rules}")
    draft = read_draft(DRAFT)
    summary = quantize_checkpoint(draft, load_recipe(str(recipe)), tmp_path / "draft")
    modules = [module for module in draft.spec.linear_modules() if module != "fc"]
    assert summary.layers == {name: len(modules)}

    packed = read_draft(tmp_path / "draft")
    assert packed.quantization.modules == dict.fromkeys(modules, name)
    rows, columns = draft.weights[f"{modules[0]}.weight"].shape
    found = {part: (t.dtype, t.shape) for part in FORMATS[name].tensors(rows, columns)
             if (t := packed.weights.get(f"{modules[0]}.{part}")) is not None}  # fmt: skip
    assert found == FORMATS[name].tensors(rows, columns)

    build(tmp_path / "draft", tmp_path / "engine")
    nodes = onnx.load(tmp_path / "engine" / "draft.onnx", load_external_data=False).graph.node
    assert "DequantizeLinear" in {node.op_type for node in nodes}
