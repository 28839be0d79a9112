# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's correlator graph against float64 equations, on ONNX Runtime and in torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.executor import CorrelatorInputs, Executor
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.drafter.open import choose_executor
from tests.engines import build
from tests.reference.lilicorr_float64 import ReferenceCorrelator
from tests.reference.synthetic import CORRELATOR, DraftSizes, write_random_draft

NOISE = {"onnxruntime": 2e-5, "torch": 0.06}
"""Bounds on errors relative to the largest score: FLOAT's, and BF16's of two layers and four projections."""


def draft_of(
    directory: Path, num_slots: int = 5, *, width: int | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """A draft with that many slots; with `width` of the correlator that of the draft, and no token_proj."""
    sizes = DraftSizes(block_size=num_slots + 1, hidden=width or DraftSizes().hidden)
    draft = write_random_draft(directory / "draft", dialect="qwen3", lilicorr="plain", dtype=dtype, sizes=sizes)
    if width is not None:
        tensors = load_file(draft / "model.safetensors")
        for part in ("weight", "bias"):
            del tensors[f"lilicorr.token_proj.{part}"]
        save_file(tensors, draft / "model.safetensors")
        config = json.loads((draft / "config.json").read_text())
        config["dflash_config"]["lilicorr_hidden_size"] = 0  # vLLM 0.33: the draft's own
        (draft / "config.json").write_text(json.dumps(config))
    return draft


def reference_of(draft: Path) -> ReferenceCorrelator:
    config = json.loads((draft / "config.json").read_text())
    stored = load_file(draft / "model.safetensors")
    tensors = {name.removeprefix("lilicorr."): tensor.double().numpy() for name, tensor in stored.items()}
    return ReferenceCorrelator(tensors=tensors, config=config["dflash_config"], eps=config["rms_norm_eps"])


def opened(draft: Path, work: Path, name: str, num_blocks: int = 2) -> Executor:
    build(draft, work / "engine")
    executor = choose_executor(work / "engine", read_manifest(work / "engine"), executor=name)
    executor.cache_rows(num_blocks)
    executor.load()
    return executor


def inputs_of(draft: Path, num_blocks: int, num_slots: int, seed: int = 0) -> CorrelatorInputs:
    """Random inputs that BF16 holds."""
    spec, generator = read_draft(draft).spec, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_blocks, *shape, generator=generator).bfloat16().float()

    k, H = CORRELATOR["lilicorr_candidate_topk"], spec.hidden_size
    log_probs = random(num_slots, 96).mul(2).log_softmax(-1).topk(int(k)).values
    return CorrelatorInputs(random(num_slots, int(k), H), log_probs, random(num_slots, H), random(H))


def expected_of(draft: Path, inputs: CorrelatorInputs) -> np.ndarray:
    reference = reference_of(draft)
    return np.stack([reference.scores(*block) for block in zip(*(x.double().numpy() for x in inputs), strict=True)])


def error(found: torch.Tensor, expected: np.ndarray) -> float:
    assert tuple(found.shape) == expected.shape
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("executor", NOISE)
@pytest.mark.parametrize("num_slots", [5, 2, 1])
def test_scores_are_the_equations(executor: str, num_slots: int, tmp_path: Path) -> None:
    """Blocks are whole or cut, more than a call in torch takes, and come after others."""
    draft = draft_of(tmp_path)
    opened_executor = opened(draft, tmp_path, executor)
    for seed, num_blocks in ((1, 1), (2, 5)):
        opened_executor.correlate(inputs_of(draft, 3, 5, seed=9)._replace(slot_hidden=torch.full((3, 5, 48), 50.0)))
        inputs = inputs_of(draft, num_blocks, num_slots, seed)
        assert error(opened_executor.correlate(inputs), expected_of(draft, inputs)) < NOISE[executor]


@pytest.mark.parametrize(("num_slots", "width"), [(1, None), (1, 24), (7, 24)])
def test_of_other_sizes(num_slots: int, width: int | None, tmp_path: Path) -> None:
    """A block of one slot, and a correlator as wide as the draft."""
    draft = draft_of(tmp_path, num_slots, width=width)
    inputs = inputs_of(draft, 2, num_slots)
    found = opened(draft, tmp_path, "onnxruntime").correlate(inputs)
    assert error(found, expected_of(draft, inputs)) < NOISE["onnxruntime"]


def test_bfloat16_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    """Published drafts have this dtype."""
    draft = draft_of(tmp_path, dtype=torch.bfloat16)
    inputs = inputs_of(draft, 2, 5)
    found = opened(draft, tmp_path, "onnxruntime").correlate(inputs)
    assert error(found, expected_of(draft, inputs)) < NOISE["onnxruntime"]
