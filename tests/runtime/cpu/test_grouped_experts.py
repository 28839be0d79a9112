# SPDX-License-Identifier: Apache-2.0
"""Experts, all of a layer in one call: transformers' own products, and rows that do not depend on each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from dflash_trt.runtime.cpu.grouped_experts import experts, group_experts
from tests.runtime.targets.families import EXPERTS, random_model

WIDE = {**EXPERTS, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1}
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral")
"""The second has biases, and weights of the other order."""


def experts_of(model: PreTrainedModel) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))


def asked(num_rows: int, top_k: int = 2) -> tuple[Tensor, Tensor]:
    """Experts and their shares [num_rows, top_k]; the last expert is never asked."""
    generator = torch.Generator().manual_seed(num_rows)
    top = torch.rand(num_rows, 3, generator=generator).topk(top_k)
    return top.indices, top.values


def wide_experts(family: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Transformers' own, and ours of the same weights."""
    model = random_model(family, **WIDE).to(dtype)
    ours = copy.deepcopy(model)
    group_experts(ours)
    return experts_of(model), experts_of(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_transformers_own(family: str, dtype: torch.dtype) -> None:
    theirs, ours = wide_experts(family, dtype)
    assert hasattr(ours, "products")
    for num_rows in (1, 3, 40):
        rows = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
        indices, shares = asked(num_rows)
        with torch.inference_mode():
            found = experts(ours, rows, indices, shares.to(dtype))
            expected = grouped_mm_experts_forward(theirs, rows, indices, shares.to(dtype))
        assert found.dtype == dtype
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_depends_on_itself_alone(family: str, dtype: torch.dtype) -> None:
    _, ours = wide_experts(family, dtype)
    rows = torch.randn(23, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    indices, shares = asked(23)
    with torch.inference_mode():
        whole = experts(ours, rows, indices, shares.to(dtype))
        for i in range(23):
            only = slice(i, i + 1)
            assert torch.equal(experts(ours, rows[only], indices[only], shares[only].to(dtype))[0], whole[i])


@pytest.mark.parametrize("family", FAMILIES)
def test_only_weights_that_were_laid_out_are_let_go(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, ours = wide_experts(family, dtype)
        stays = dtype == torch.bfloat16 and family != "gpt_oss"
        assert (ours.gate_up_proj.numel() > 0) == stays
        assert (ours.down_proj.numel() > 0) == stays
