# SPDX-License-Identifier: Apache-2.0
"""Speculators 0.9.0 itself loads the DFlash2 draft that `convert` writes, and what it saves is read back."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.cli.commands import run_here
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"


@pytest.mark.full
@pytest.mark.skipif(
    find_spec("speculators") is None, reason="in an environment of its own: pip install speculators==0.9.0"
)
def test_what_convert_writes_loads_and_comes_back(tmp_path: Path) -> None:
    from speculators import SpeculatorModelConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    written, saved = tmp_path / "written", tmp_path / "saved"
    run_here("convert", DRAFT, "-o", written, "--to", "speculators", "--target", TARGET)
    config = SpeculatorModelConfig.from_pretrained(str(written))
    assert isinstance(config, DFlash2SpeculatorConfig)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k, config.block_size) == (32, 16, 8)
    assert (config.sliding_window_non_causal, config.aux_hidden_state_layer_ids) == (True, [1, 2, 3])
    model = DFlash2DraftModel.from_pretrained(str(written), config=config)
    ours, theirs = load_file(DRAFT / "model.safetensors"), model.state_dict()
    assert {name for name, tensor in ours.items() if torch.equal(tensor, theirs[name].to(tensor.dtype))} == set(ours)
    model.to(torch.bfloat16).save_pretrained(saved)
    before, after = read_draft(written), read_draft(saved)
    assert after.spec == before.spec
    assert after.weights.keys() == before.weights.keys()
