# SPDX-License-Identifier: Apache-2.0
"""A target that has no room is refused with numbers, before it is fetched or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.runtime.targets import huggingface as memory
from dflash_trt.runtime.targets.huggingface import check_memory, free_bytes, load_model, loaded_bytes
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES

TARGET = FIXTURES / "tiny-qwen3"


def tensor(name: str, dtype: str, *shape: int) -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=shape, file=Path("w"), offset=0, num_bytes=0)


def weights(*tensors: Tensor) -> dict[str, Tensor]:
    return {each.name: each for each in tensors}


def test_every_weight_becomes_a_float() -> None:
    mixed = weights(tensor("a", "BF16", 3, 4), tensor("b", "F32", 2), tensor("c", "BF16"))
    assert loaded_bytes(mixed, torch.float32) == 4 * (12 + 2 + 1)
    assert loaded_bytes(mixed, torch.bfloat16) == 2 * (12 + 2 + 1)


def test_embeddings_that_are_the_head_are_laid_out_once_more() -> None:
    table, head = tensor("model.embed_tokens.weight", "BF16", 8, 4), tensor("lm_head.weight", "BF16", 8, 4)
    assert loaded_bytes(weights(table), torch.float32) == loaded_bytes(weights(table, head), torch.float32) == 4 * 64
    assert loaded_bytes(weights(table), torch.bfloat16) == 2 * 32


def test_packed_experts_are_unpacked() -> None:
    """gpt-oss: gate_up_proj_blocks U8 [E, 2I, H/32, 16], two codes a byte, and a scale for 32 of them."""
    blocks, scales = tensor("x.gate_up_proj_blocks", "U8", 2, 8, 3, 16), tensor("x.gate_up_proj_scales", "U8", 2, 8, 3)
    assert loaded_bytes(weights(blocks, scales), torch.float32) == 4 * (2 * 8 * 3 * 32)
    assert loaded_bytes(weights(scales), torch.float32) == 4 * (2 * 8 * 3)  # of something else


def test_one_layers_experts_are_laid_out_beside_themselves() -> None:
    """Their first matrices: one after the other as checkpoints of Qwen, MiniMax and gpt-oss name them."""
    experts = [
        *(
            tensor(f"l.0.mlp.experts.{e}.{name}.weight", "BF16", 3, 4)
            for e in (0, 1)
            for name in ("gate_proj", "up_proj")
        ),
        tensor("l.0.mlp.experts.0.down_proj.weight", "BF16", 4, 3),
        *(tensor(f"l.1.moe.experts.0.{name}.weight", "BF16", 3, 4) for name in ("w1", "w2", "w3")),
        tensor("l.2.mlp.experts.gate_up_proj_blocks", "U8", 2, 3, 1, 5),
    ]
    values = 4 * 12 + 12 + 3 * 12 + 60
    assert loaded_bytes(weights(*experts), torch.float32) == 4 * (values + 60)
    assert loaded_bytes(weights(*experts[:-1]), torch.float32) == 4 * (values - 60 + 4 * 12)
    assert loaded_bytes(weights(*experts[5:-1]), torch.float32) == 4 * (3 * 12 + 2 * 12)
    assert loaded_bytes(weights(*experts), torch.bfloat16) == 2 * (values + 60)


def test_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1_500_000_000)
    large = weights(tensor("a", "BF16", 10**9))
    message = refusal(lambda: check_memory(Path("large"), large, torch.float32))
    assert "large: expected 4.0 GB of free memory for its weights" in message
    assert "found 1.5 GB" in message
    check_memory(Path("large"), large, torch.float32, num_ranks=4)


def test_it_is_asked_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = loaded_bytes(read_weights(TARGET), torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed - 1)
    assert "of free memory for its weights" in refusal(lambda: load_model(TARGET, read_target(TARGET).spec, [0]))
    monkeypatch.setattr(memory, "free_bytes", lambda: needed)
    assert 4 * load_model(TARGET, read_target(TARGET).spec, [0]).num_parameters() <= needed


def test_this_machine_has_memory() -> None:
    free = free_bytes()
    assert free is not None
    assert 2**20 < free < 2**50


@pytest.mark.parametrize(("limit", "room"), [("max", None), ("1000000", 400_000), ("500000", 0)])
def test_a_containers_limit(limit: str, room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.stat").write_text("anon 600000\nfile 300000\n")
    monkeypatch.setattr(memory, "_own_cgroup", lambda: tmp_path)
    assert memory._cgroup_room() == room
    if room is not None:
        assert free_bytes() == room
