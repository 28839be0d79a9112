# SPDX-License-Identifier: Apache-2.0
"""How many rows a pass has for a target's layers."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.targets.packed_target import PackedTarget, padded_size
from dflash_trt.runtime.targets.target import Segment
from tests.runtime.targets.families import random_model

WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}


@pytest.mark.parametrize(("rows", "size"), [(0, 0), (1, 1), (16, 16), (17, 18), (33, 36), (129, 144), (257, 288)])
def test_sizes(rows: int, size: int) -> None:
    assert padded_size(rows) == size


def test_every_size_holds_its_rows() -> None:
    """A size is at most an eighth more, and there are few: kernels are made and kept for each."""
    sizes = [padded_size(rows) for rows in range(1, 1025)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 16 + 8 * 6


@pytest.mark.parametrize(
    ("dtype", "settings", "sizes"),
    [(torch.bfloat16, {}, [36, 20]), (torch.bfloat16, WIDE, [35, 19]), (torch.float32, {}, [35, 19])],
    ids=["bfloat16", "wide-bfloat16", "float32"],
)
def test_layers_see_few_sizes_where_onednn_is_asked(
    dtype: torch.dtype, settings: dict[str, int], sizes: list[int]
) -> None:
    """In BF16, for short rows; callers see their rows."""
    model = random_model("qwen3", num_hidden_layers=1, **settings).to(dtype)
    target = PackedTarget(model, (0,), 1, accelerate(model))
    seen = []
    for layer in (model.model.layers[0].mlp.up_proj, model.lm_head):
        layer.register_forward_pre_hook(lambda _, rows: seen.append(rows[0].numel() // rows[0].shape[-1]))
    verified = target.verify([Segment(slot=0, token_ids=[1] * 35, num_logits=19)], with_taps=True)
    assert seen == sizes
    assert target.is_batch_invariant or not settings, "all products are ours"
    assert (len(verified.logits), len(verified.taps)) == (19, 35)
