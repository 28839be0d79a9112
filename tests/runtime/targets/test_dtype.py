# SPDX-License-Identifier: Apache-2.0
"""The type that a target is computed in: chosen, refused, and half the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.runtime.targets import huggingface
from dflash_trt.runtime.targets.dtype import target_dtype
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES

TARGET = FIXTURES / "tiny-qwen3"


def stored_as(directory: Path, dtype: torch.dtype, names: str = "") -> Path:
    """The weights of the fixture, those with `names` in their names in another type."""
    tensors = load_file(TARGET / "model.safetensors")
    directory.mkdir()
    changed = {name: tensor.to(dtype) if names in name else tensor for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_holds_every_value(stored: torch.dtype, tmp_path: Path) -> None:
    directory = stored_as(tmp_path / "target", stored)
    for asked in ("auto", "float32"):
        assert target_dtype(asked, directory, read_weights(directory)) == torch.float32


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_bfloat16_rounds_no_other_type(name: str, tmp_path: Path) -> None:
    directory = stored_as(tmp_path / "target", getattr(torch, name))
    message = refusal(lambda: target_dtype("bfloat16", directory, read_weights(directory)), CheckpointError)
    assert f"{directory}: dtype bfloat16: expected weights in bfloat16, found {name} (" in message
    assert "hint: decode it with --dtype float32" in message


def test_a_few_tensors_of_another_type(tmp_path: Path) -> None:
    """Norms in FLOAT stand in many BF16 checkpoints; one tensor in FP16 is no BF16 checkpoint's."""
    few = stored_as(tmp_path / "few", torch.float32, "norm")
    assert target_dtype("bfloat16", few, read_weights(few)) == torch.bfloat16
    one = stored_as(tmp_path / "one", torch.float16, "lm_head")
    message = refusal(lambda: target_dtype("bfloat16", one, read_weights(one)), CheckpointError)
    assert "found float16 (lm_head.weight)" in message


@pytest.mark.parametrize("asked", ["float16", "BF16", ""])
def test_no_such_type(asked: str) -> None:
    expected = "dtype: expected auto, float32 or bfloat16, found"
    assert expected in refusal(lambda: target_dtype(asked, TARGET, {}), RequestError)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt-oss"])
def test_half_the_bytes(name: str) -> None:
    directory = FIXTURES / name
    spec = read_target(directory).spec
    full, half = (load_model(directory, spec, [0], dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert sum(p.nbytes for p in full.parameters()) == 2 * sum(p.nbytes for p in half.parameters())
    per_token = [make_target(model, [0], 1).cache_bytes_per_token for model in (full, half)]
    assert per_token[0] == 2 * per_token[1] > 0


def test_half_the_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = read_target(TARGET).spec, read_weights(TARGET)
    needed = huggingface.loaded_bytes(weights, torch.bfloat16)
    monkeypatch.setattr(huggingface, "free_bytes", lambda: needed)
    message = refusal(lambda: load_model(TARGET, spec, [0]), CheckpointError)
    assert "computed with as 32-bit numbers" in message
    assert "hint: --dtype bfloat16 halves them" in message
    load_model(TARGET, spec, [0], dtype="bfloat16")
    monkeypatch.setattr(huggingface, "free_bytes", lambda: needed - 1)
    message = refusal(lambda: load_model(TARGET, spec, [0], dtype="bfloat16"), CheckpointError)
    assert "computed with as 16-bit numbers" in message
    assert "--dtype" not in message
