# SPDX-License-Identifier: Apache-2.0
"""Norms in one call, against transformers' own."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dflash_trt.runtime.cpu.accelerate import fuse_norms, normed
from tests.runtime.targets.families import random_model
from tests.runtime.targets.test_packed_pass import PACKED


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}


def is_fused(module: nn.Module) -> bool:
    return isinstance(module.forward, partial)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3", "gemma2", "gemma3_text", "deepseek_v3", "olmo3", "qwen3_next"])
def test_a_familys_norms_stay_what_they_are(name: str) -> None:
    """Gemma's and Qwen3-Next's weights count from 1."""
    model_type, settings = PACKED[name]
    model = random_model(model_type, **settings)
    for module in norms(model).values():
        for weight in module.parameters():
            weight.uniform_(-0.5, 0.5)
    own = norms(copy.deepcopy(model))
    fuse_norms(model)
    assert all(map(is_fused, norms(model).values()))
    for path, module in norms(model).items():
        (weight,) = module.parameters()
        rows = torch.randn(3, 5, len(weight)).transpose(0, 1)
        torch.testing.assert_close(module(rows), own[path](rows), rtol=1e-5, atol=1e-6)


class OddRMSNorm(nn.Module):
    """Norm of another formula, which centres its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def test_a_norm_of_another_formula_is_left_alone() -> None:
    model = random_model("qwen3")
    model.add_module("odd", OddRMSNorm())
    fuse_norms(model)
    assert not is_fused(model.odd)  # type: ignore[arg-type]
    assert is_fused(model.model.norm)


def test_bfloat16_is_left_alone() -> None:
    model = random_model("qwen3").bfloat16()
    fuse_norms(model)
    assert not any(map(is_fused, norms(model).values()))


@pytest.mark.parametrize("dim", [1, 15, 16, 33, 128])
def test_a_row_by_itself_has_the_same_bits(dim: int) -> None:
    """Compares one row, and enough rows for threads to share."""
    torch.manual_seed(dim)
    rows, weight = torch.randn(3 * 2**16 // dim, dim), torch.randn(dim)
    together = normed(weight, 1e-6, rows)
    for row in (0, 1, len(rows) - 1):
        assert torch.equal(normed(weight, 1e-6, rows[row]), together[row])
    expected = rows.double() * torch.rsqrt(rows.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(together.double(), expected, rtol=1e-5, atol=1e-6)
    assert normed(weight, 1e-6, rows[:0]).shape == (0, dim)
