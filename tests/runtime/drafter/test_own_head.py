# SPDX-License-Identifier: Apache-2.0
"""An lm_head of the draft's own, dense and quantised: the graph's proposals are the argmax of its hidden states."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch

from dflash_trt import _C
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.runtime.drafter.open import open_drafter
from tests.contract.builder_model import problems
from tests.contract.onnx_operators import RELEASES
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES
from tests.quantize.samples import unpacked_fp8, unpacked_nvfp4

ROWS, H = 300, 128
INPUT_SCALE = 0.05


def quantised(algorithm: str, weight: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The head's tensors as modelopt writes them, and the weights that they stand for."""
    codes = np.empty((ROWS, H), np.uint8)
    scale = torch.tensor(0.01)
    tensors = {"lm_head.input_scale": torch.tensor(INPUT_SCALE)} if algorithm != "W4A16_NVFP4" else {}
    if algorithm == "FP8":
        _C.pack_fp8(weight, 0.01, codes)
        expected = unpacked_fp8(codes, 0.01)
        weights = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": scale}
    else:
        packed, scales = np.empty((ROWS, H // 2), np.uint8), np.empty((ROWS, H // 16), np.uint8)
        _C.pack_nvfp4(weight, 0.01, packed, scales)
        expected = unpacked_nvfp4(packed, scales, 0.01)
        block_scales = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        weights = {"weight": torch.from_numpy(packed), "weight_scale": block_scales, "weight_scale_2": scale}
    return tensors | {f"lm_head.{name}": tensor for name, tensor in weights.items()}, expected


def with_head(directory: Path, algorithm: str | None) -> tuple[DraftCheckpoint, np.ndarray, torch.Tensor]:
    """The draft, the weights of its head, and the tokens of its rows."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(1024, generator=generator)[:ROWS]
    weight = torch.randn(ROWS, H, generator=generator).bfloat16().float()
    tensors, expected = {"lm_head.weight": weight.bfloat16()}, weight.numpy()
    if algorithm is not None:
        tensors, expected = quantised(algorithm, weight.numpy())
    tensors["d2t"] = tokens - torch.arange(ROWS)
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", directory, {"draft_vocab_size": ROWS}, tensors)
    modules = {} if algorithm is None else {"lm_head": algorithm}
    return (
        msgspec.structs.replace(draft, quantization=Quantization(modules=modules, fp8_kv_cache=False)),
        expected,
        tokens,
    )


@pytest.mark.parametrize("algorithm", [None, "FP8", "W4A16_NVFP4"])
def test_proposals_are_the_argmax_of_hidden(algorithm: str | None, tmp_path: Path) -> None:
    draft, weight, tokens = with_head(tmp_path / "draft", algorithm)
    manifest = build_featured(draft, tmp_path / "engine")
    drafter = open_drafter(tmp_path / "engine", manifest, num_slots=2)
    generator = torch.Generator().manual_seed(4)
    drafter.inject([0, 1], [5, 2], torch.randn(7, draft.spec.target_hidden_size, generator=generator))
    blocks = torch.randn(2, draft.spec.block_size, H, generator=generator)
    hidden = drafter.draft([1, 0], blocks)[:, 1:]
    if algorithm == "FP8":  # its input, too, by the static scale
        hidden = (hidden / INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * INPUT_SCALE
    best = (hidden.double() @ torch.from_numpy(weight).double().T).argmax(dim=-1)
    assert torch.equal(drafter.propose([1, 0], blocks), tokens[best])
    assert best.unique().numel() > 5

    model = onnx.load(tmp_path / "engine" / "draft.onnx", load_external_data=False)
    for release in RELEASES:
        assert problems(model, release, tmp_path / "engine") == []
