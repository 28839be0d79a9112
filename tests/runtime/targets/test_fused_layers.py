# SPDX-License-Identifier: Apache-2.0
"""Norms of one kernel, as a GPU has them, against transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_trt.runtime.targets.fused_layers import fuse_layers, replace_norms, torch_norm
from dflash_trt.runtime.targets.packed_target import PackedTarget
from tests.runtime.targets.families import (
    NUM_SLOTS,
    TAPS,
    computed,
    family_model,
    random_history,
    recomputed,
    relative_error,
)

TOLERANCE = 1e-4


def with_weights(model: PreTrainedModel) -> list[nn.Module]:
    """The model's norms, with weights that are neither 0 nor 1."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        for weight in norm.parameters():
            nn.init.uniform_(weight, 0.5, 1.5)
    return norms


def replaced(norms: list[nn.Module]) -> int:
    return sum("forward" in vars(norm) for norm in norms)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3"])
def test_a_pass_is_the_models_own(name: str) -> None:
    """Both formulas: by the weight, and by 1 more; with MLPs whose gates are one function."""
    model = copy.deepcopy(family_model(name))
    norms, turns = with_weights(model), random_history(seed=1)
    expected = recomputed(model, turns)
    replace_norms(model, torch_norm)
    fuse_layers(model)
    assert replaced(norms) == len(norms) > 4
    mlps = [module for module in model.modules() if hasattr(module, "up_proj") and hasattr(module, "down_proj")]
    assert replaced(mlps) == len(mlps) == (0 if name == "gpt_oss" else 4)
    assert relative_error(computed(PackedTarget(model, TAPS, NUM_SLOTS), turns), expected) < TOLERANCE


@pytest.mark.parametrize(("name", "is_replaced"), [("qwen3", True), ("gpt_oss", True), ("gemma2", False)])
def test_in_bf16(name: str, is_replaced: bool) -> None:
    """Nothing is replaced whose factor would be rounded there."""
    model = copy.deepcopy(family_model(name))
    norms = with_weights(model.bfloat16())
    rows = torch.randn(3, model.config.hidden_size).bfloat16()
    expected = norms[-1](rows)
    replace_norms(model, torch_norm)
    assert replaced(norms) == is_replaced * len(norms)
    torch.testing.assert_close(norms[-1](rows), expected, rtol=2**-7, atol=0)


def test_another_formula_stays() -> None:
    class HalfRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.full((8,), 1.5)), 1e-6

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch_norm(self.weight, self.eps, rows) / 2

    model = copy.deepcopy(family_model("qwen3"))
    model.extra = norm = HalfRMSNorm()  # type: ignore[assignment]
    replace_norms(model, torch_norm)
    assert not replaced([norm])


def test_another_mlp_stays() -> None:
    class SquaredMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(rows).relu().square() * self.up_proj(rows))  # type: ignore[no-any-return]

    model = copy.deepcopy(family_model("qwen3"))
    model.extra = mlp = SquaredMLP()  # type: ignore[assignment]
    fuse_layers(model)
    assert not replaced([mlp])
