# SPDX-License-Identifier: Apache-2.0
"""Configurations that a draft checkpoint, as it lies on the disk, contradicts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.deploy.broken.case import SPEC, Case
from tests.deploy.broken.configuration import changed, checked
from tests.paths import FIXTURES


def write_draft(tmp_path: Path, **config: object) -> Path:
    """The fixture draft with some keys of its config.json changed."""
    directory = tmp_path / "draft"
    shutil.copytree(FIXTURES / "tiny-gpt-oss-dflash", directory)
    values = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_native_backbone_of_a_checkpoint(tmp_path: Path) -> None:
    """gpt_oss leads to layers without qkv_proj; qwen3 to a dense backbone, whatever DFlash architecture is named."""
    case = Case(rule="", key="", words="")
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    gpt_oss = checked(tmp_path, document, case, draft=str(FIXTURES / "tiny-gpt-oss-dflash"))
    (finding,) = [f for f in gpt_oss if f.rule == "backbone"]
    assert finding.severity == ERROR
    assert "found 'gpt_oss'; write qwen3 there and keep attention_bias" in str(finding)
    quantize_checkpoint(read_draft(FIXTURES / "tiny-gpt-oss-dflash"), load_recipe("bf16"), tmp_path / "bf16")
    for draft in (write_draft(tmp_path, model_type="qwen3"), tmp_path / "bf16"):
        assert [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "backbone"] == []


def test_facts_of_a_checkpoint(tmp_path: Path) -> None:
    draft = write_draft(tmp_path, model_type="qwen3")
    mask = json.loads((draft / "config.json").read_text())["dflash_config"]["mask_token_id"]
    case = Case(rule="", key="", words="")
    taps = json.loads((draft / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    good = {f"{SPEC}.max_draft_len": 7, f"{SPEC}.mask_token_id": mask, f"{SPEC}.target_layer_ids": taps}
    document = changed("trtllm", {**good, f"{SPEC}.mask_token_id": mask + 1})
    found = checked(tmp_path, document, case, draft=str(draft))
    assert any(f.rule == "draft-facts" and f"expected {mask}" in f.problem for f in found)
    document = changed("trtllm", good)
    assert not [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "draft-facts"]


@pytest.mark.parametrize(("recipe", "is_refused"), [("nvfp4", True), ("nvfp4-native", False)])
def test_quantised_projections_in_native_mode(tmp_path: Path, recipe: str, is_refused: bool) -> None:
    from tests.cli.commands import run_here

    draft = tmp_path / "quantised"
    run_here("quantize", FIXTURES / "tiny-qwen3-dflash", "-o", draft, "--recipe", recipe)
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    found = checked(tmp_path, document, Case(rule="", key="", words=""), draft=str(draft))
    refusals = [str(f) for f in found if f.rule == "quantized-context"]
    assert bool(refusals) == is_refused
    if is_refused:
        assert "found layers.0.self_attn.q_proj and" in refusals[0]
        assert "in NVFP4; quantise with --recipe nvfp4-native, or serve in engine mode" in refusals[0]
    vllm = Case(runtime="vllm", rule="", key="", words="")
    document = changed("vllm", {f"{SPEC}.num_speculative_tokens": 7})
    warned = [f for f in checked(tmp_path, document, vllm, draft=str(draft)) if f.rule == "quantized-context"]
    assert [f.severity for f in warned] == ([WARNING] if is_refused else [])
