# SPDX-License-Identifier: Apache-2.0
"""Lists of dense modules are compared with the tensors, and every written list is made from the tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.convert_dialect import convert_dialect
from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.exclude_list import exclude_list_problem
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.quantize.unwritten_draft import unchanged
from tests.checkpoint.samples import edit_config
from tests.cli.commands import run
from tests.paths import FIXTURES


def quantised(tmp_path: Path, recipe: str = "nvfp4-native") -> Path:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe(recipe), tmp_path / "q")
    return tmp_path / "q"


def as_exporter_writes(directory: Path) -> Path:
    """The sections of Model Optimizer 0.47's DFlash exporter: nested, without a method, names of its wrapper."""
    details = json.loads((directory / "hf_quant_config.json").read_text())
    details["quantization"]["exclude_modules"] = ["dflash_module.fc", "lm_head", "model*"]
    (directory / "hf_quant_config.json").write_text(json.dumps(details))
    return edit_config(directory, quantization_config=details)


def sections(directory: Path) -> tuple[Any, Any]:
    config = json.loads((directory / "config.json").read_text())
    return config["quantization_config"], json.loads((directory / "hf_quant_config.json").read_text())


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4-native", "nvfp4-w4a16", "mixed-nvfp4-fp8", "int4-w4a16"])
def test_the_lists_of_quantize_fit(recipe: str, tmp_path: Path) -> None:
    assert exclude_list_problem(read_draft(quantised(tmp_path, recipe))) is None


def test_the_section_is_written_from_the_tensors(tmp_path: Path) -> None:
    directory = quantised(tmp_path)
    expected = sections(directory)
    draft = read_draft(as_exporter_writes(directory))
    for layout in ("zlab", "modelopt"):
        convert_dialect(draft, LAYOUTS[layout], tmp_path / layout)
        assert sections(tmp_path / layout) == expected
    (tmp_path / "unchanged").mkdir()
    unchanged(draft).write(tmp_path / "unchanged")
    assert sections(tmp_path / "unchanged") == expected


def test_a_list_that_covers_packed_layers(tmp_path: Path) -> None:
    directory = as_exporter_writes(quantised(tmp_path))
    words = "lists 'model*' as dense, which covers layers.0.self_attn.o_proj and 11 more"
    place = "config.json: quantization_config.exclude_modules"
    assert exclude_list_problem(read_draft(directory)) == f"{place} {words}"
    shown = run("inspect", directory)
    assert shown.returncode == 0
    assert f"{words}; `dflash-trt convert --to zlab` writes the list from the tensors" in shown.stderr
    target = FIXTURES / "tiny-qwen3"
    served = run("serve-config", directory, "--target", target, "--gpus", "b200x1", "--runtime", "vllm")
    assert words in served.stderr
    assert "[exclude-list]" in served.stderr


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (["*mlp*"], "lists '*mlp*' as dense, which covers layers.0.mlp.gate_proj and 8 more"),
        (["layers.1.mlp"], "lists 'layers.1.mlp' as dense, which covers layers.1.mlp.gate_proj and 2 more"),
        (["*qkv_proj", "*fc"], "misses layers.0.self_attn.q_proj and 8 more, which the tensors show as dense"),
        (["*q_proj", "*k_proj", "*v_proj"], "misses fc, which the tensors show as dense"),
        ([], "misses fc and 9 more, which the tensors show as dense"),
        (["*q_proj", "*k_proj", "*v_proj", "model.fc"], None),
    ],
)
def test_lists_by_hand(listed: list[str], words: str | None, tmp_path: Path) -> None:
    directory = quantised(tmp_path)
    (directory / "hf_quant_config.json").unlink()
    problem = exclude_list_problem(read_draft(edit_config(directory, quantization_config__ignore=listed)))
    assert problem == (None if words is None else f"config.json: quantization_config.ignore {words}")


def test_layers_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    directory = quantised(tmp_path, "mixed-nvfp4-fp8")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]["quantized_layers"]["layers.0.mlp.up_proj"]
    (directory / "config.json").write_text(json.dumps(config))
    words = "quantized_layers misses layers.0.mlp.up_proj, which the tensors show as quantised"
    assert words in (exclude_list_problem(read_draft(directory)) or "")
