# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one input as one product, against the layers one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dflash_trt.runtime.targets.compiled_layers import MergedLinear, MergedPart, merge_linear_layers
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


def memory(model: nn.Module) -> int:
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage() for weight in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3", 8), ("gpt_oss", 4), ("gemma4", 6), ("gemma4-small", 6), ("glm4_moe", 8)]
)
def test_a_pass_is_the_models_own(name: str, expected: int) -> None:
    """In the same memory, of which a pass keeps nothing."""
    model, turns = copy.deepcopy(family_model(name)), random_history(seed=4)
    wanted, before = recomputed(model, turns), memory(model)
    merge_linear_layers(model)
    merged = [module for module in model.modules() if isinstance(module, MergedLinear)]
    assert len(merged) == expected
    assert memory(model) == before
    assert relative_error(computed(PackedTarget(model, TAPS, NUM_SLOTS), turns), wanted) < 1e-4
    assert all(module.rows is None and module.products == () for module in merged)


class Attention(nn.Module):
    """In any order, and of two inputs."""

    def __init__(self, *, num_biases: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=n <= num_biases) for n in (1, 2, 3))

    def forward(self, rows: torch.Tensor, order: str, others: torch.Tensor) -> list[torch.Tensor]:
        given = {"q": rows, "k": rows, "v": others}
        products = {name: getattr(self, f"{name}_proj")(given[name]) for name in order}
        return [products[name] for name in "qkv"]


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv", "qvk"])
@pytest.mark.parametrize("is_one", [False, True])
def test_layers_called_in_another_way(order: str, is_one: bool) -> None:
    rows = torch.randn(2, 5, 8)
    others = rows if is_one else torch.randn(2, 5, 8)
    module = Attention()
    expected = module(rows, order, others)
    merge_linear_layers(module)
    assert isinstance(module.v_proj, MergedPart)
    for _ in range(2):
        torch.testing.assert_close(module(rows, order, others), expected)


class Linear(nn.Linear):
    """A quantised layer, say."""


def test_what_is_no_plain_layer_stays() -> None:
    biased, odd, typed, short = (Attention(num_biases=n) for n in (2, 3, 3, 3))
    odd.v_proj, short.v_proj = Linear(8, 3), None
    typed.v_proj = typed.v_proj.bfloat16()
    for module in (biased, odd, typed, short):
        merge_linear_layers(module)
        assert type(module.q_proj) is nn.Linear
