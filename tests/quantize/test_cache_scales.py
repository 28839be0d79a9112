# SPDX-License-Identifier: Apache-2.0
"""The scales of an FP8 context cache: read from the checkpoint, and claimed by its configuration where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe("nvfp4+fp8-kv"), tmp_path / "draft")
    return tmp_path / "draft"


def test_they_are_read(draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    checkpoint = read_draft(draft)
    for kv in "kv":
        names = [f"layers.{i}.self_attn.{kv}_proj.{kv}_scale" for i in range(checkpoint.spec.num_layers)]
        assert checkpoint.cache_scales(kv) == tuple(float(tensors[name]) for name in names)
    assert set(checkpoint.cache_scales("k") + checkpoint.cache_scales("v")) != {1.0}


def test_a_claim_that_the_tensors_do_not_bear_out(draft: Path) -> None:
    file = draft / "hf_quant_config.json"
    document = json.loads(file.read_text())
    del document["quantization"]["kv_cache_quant_algo"]
    file.write_text(json.dumps(document))
    assert (
        f"{file}: quantization.kv_cache_quant_algo: expected FP8 (k_scale and v_scale tensors), found None"
        in refusal(lambda: read_draft(draft))
    )
