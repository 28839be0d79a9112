# SPDX-License-Identifier: Apache-2.0
"""The draft's tensors: exactly those that the facts demand, each of the right shape and dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.checkpoint.samples import edit_config, edit_tensors, refusal, shard
from tests.reference.synthetic import write_random_draft

V_BIAS = "layers.1.self_attn.v_proj.bias"


def test_missing_tensor(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.pop(V_BIAS))
    message = refusal(lambda: read_draft(draft_dir))
    assert message.startswith(f"{draft_dir}: missing tensor '{V_BIAS}' [32]")
    assert "1 of 48 missing" in message


def test_lost_biases(draft_dir: Path) -> None:
    """What other converters drop without a word."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]

    assert "12 of 48 missing" in refusal(lambda: read_draft(edit_tensors(draft_dir, drop)))


def test_biases_that_the_facts_deny(draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, attention_bias=False)))
    assert "model.safetensors: expected the 36 tensors that config.json describes" in message
    assert "found tensor 'layers.0.self_attn.k_proj.bias' besides (12 that nothing would use)" in message


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "layers.3.mlp.up_proj.weight", "d2t"])
def test_extra_tensor(name: str, draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.zeros(2)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"found tensor '{name}' besides (1 that nothing would use)" in message


def test_extra_tensor_in_a_shard_is_named_with_its_file(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({"zzz": torch.zeros(2)}))
    message = refusal(lambda: read_draft(shard(draft_dir)))
    assert message.startswith(f"{draft_dir}/model-0000")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (48, 96), [48, 144]),  # two taps instead of three
        ("layers.0.self_attn.q_norm.weight", (64,), [16]),
        ("layers.2.mlp.down_proj.weight", (80, 48), [48, 80]),
        (V_BIAS, (32, 1), [32]),
        ("norm.weight", (), [48]),
    ],
)
def test_wrong_shape(name: str, shape: tuple[int, ...], expected: list[int], draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"model.safetensors: tensor '{name}': expected shape {expected}, found {list(shape)}" in message


@pytest.mark.parametrize(
    ("dtype", "found"), [(torch.int32, "I32"), (torch.float64, "F64"), (torch.float8_e5m2, "F8_E5M2")]
)
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "norm.weight", V_BIAS])
def test_wrong_dtype(name: str, dtype: torch.dtype, found: str, draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"tensor '{name}': expected " in message
    assert "BF16" in message
    assert message.endswith(f"found {found}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dialect", ["gpt_oss", "qwen3"])
def test_float_weights_are_read_as_they_are(dtype: torch.dtype, dialect: str, tmp_path: Path) -> None:
    draft = read_draft(write_random_draft(tmp_path / "draft", dialect=dialect, dtype=dtype))  # type: ignore[arg-type]
    expected = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert {tensor.dtype for tensor in draft.weights.values()} == {expected}


def test_a_pickle_beside_the_weights(draft_dir: Path) -> None:
    """MiMo keeps a trained mask embedding there: without it the drafter would be another one."""
    (draft_dir / "mask_embedding.pt").write_bytes(b"\x80\x04.")
    message = refusal(lambda: read_draft(draft_dir))
    assert "expected all tensors in safetensors files, found mask_embedding.pt (pickle)" in message


def test_pickles_only(draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").rename(draft_dir / "pytorch_model.bin")
    assert "found pickle weights (pytorch_model.bin)" in refusal(lambda: read_draft(draft_dir))
