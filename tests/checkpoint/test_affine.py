# SPDX-License-Identifier: Apache-2.0
"""MLX's affine weights and Model Optimizer's INT4 of any group are read as what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.decoded_tensor import DecodedTensor, as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.finite import check_finite
from tests.checkpoint.compressed_samples import Meant, linear_modules
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.cli.commands import run
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes(hidden=128, intermediate=256, num_heads=4, num_kv_heads=2, head_dim=32)
Q = "layers.0.self_attn.q_proj"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=SIZES)


def write_mlx(draft: Path, *, bits: int = 4, group: int = 64, dtype: torch.dtype = torch.bfloat16) -> Meant:
    """Packs every linear layer as MLX documents it: codes in words of 32 bits, the first in the lowest bits."""
    file, meant = draft / "model.safetensors", Meant()
    tensors = load_file(file)
    for module in linear_modules(tensors):
        weight = tensors.pop(f"{module}.weight").float()
        groups = weight.reshape(len(weight), -1, group)
        low, high = groups.amin(-1), groups.amax(-1)
        scales, biases = ((high - low) / (2**bits - 1)).to(dtype), low.to(dtype)
        codes = ((groups - biases.float()[..., None]) / scales.float()[..., None].clamp(min=1e-20)).round()
        codes = codes.clamp(0, 2**bits - 1)
        exact = codes * scales.float()[..., None] + biases.float()[..., None]
        meant[f"{module}.weight"] = exact.reshape(weight.shape).bfloat16().float().numpy()
        words = np.zeros((len(weight), weight.shape[1] * bits // 32), np.uint64)
        flat = codes.reshape(weight.shape).long().numpy().astype(np.uint64)
        for place in range(32 // bits):  # word by word, as the format's definition has it
            words |= flat[:, place :: 32 // bits] << np.uint64(bits * place)
        tensors |= {
            f"{module}.weight": torch.from_numpy(words.astype(np.uint32)),
            f"{module}.scales": scales.contiguous(), f"{module}.biases": biases.contiguous(),
        }  # fmt: skip
    save_file(tensors, file, {"format": "mlx"})
    section = {"group_size": group, "bits": bits, "mode": "affine"}
    edit_config(draft, quantization=section, quantization_config=section)
    return meant


def write_int4(draft: Path, *, group: int = 128, awq: bool = False) -> Meant:
    """Packs every linear layer as Model Optimizer 0.47's INT4 export does."""
    file, meant = draft / "model.safetensors", Meant()
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for module in linear_modules(tensors):
        weight = tensors.pop(f"{module}.weight").float()
        groups = weight.reshape(len(weight), -1, group)
        scales = groups.abs().amax(-1) / 7
        codes = (groups / scales[..., None].clamp(min=1e-20)).round().clamp(-8, 7).reshape(weight.shape).to(torch.int8)
        exact = codes.float() * scales.repeat_interleave(group, dim=1)
        tensors |= {
            f"{module}.weight": (codes[0::2] & 15 | codes[1::2] << 4).view(torch.uint8),
            f"{module}.weight_scale": scales,
        }
        if awq and module.endswith(("o_proj", "down_proj")):
            factor = (0.5 + torch.rand(weight.shape[1], generator=generator)).bfloat16()
            tensors[f"{module}.pre_quant_scale"] = factor
            exact = exact * factor.float()
        meant[f"{module}.weight"] = exact.bfloat16().float().numpy()
    save_file(tensors, file)
    section = {"quant_algo": "W4A16_AWQ", "quant_method": "modelopt", "pre_quant_scale": True}
    (draft / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    edit_config(draft, quantization_config=section)
    return meant


def check_meant(draft: DraftCheckpoint, meant: Meant) -> None:
    for name, expected in meant.items():
        tensor = draft.weights[name]
        assert isinstance(tensor, DecodedTensor)
        assert np.array_equal(as_float32(map_tensor(tensor)), expected), name
    check_finite(draft.weights.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (8, 128)])
def test_mlx(bits: int, group: int, dtype: torch.dtype, draft: Path) -> None:
    meant = write_mlx(draft, bits=bits, group=group, dtype=dtype)
    read = read_draft(draft)
    check_meant(read, meant)
    assert str(read.stored_as).startswith(f"MLX {bits} bits, groups of {group}: {len(meant)} layers, ")
    assert "quantization" not in read.config


@pytest.mark.parametrize("awq", [False, True])
@pytest.mark.parametrize("group", [128, 64, 16])
def test_int4_of_model_optimizer(group: int, awq: bool, draft: Path) -> None:
    meant = write_int4(draft, group=group, awq=awq)
    read = read_draft(draft)
    check_meant(read, meant)
    assert str(read.stored_as).startswith(f"Model Optimizer's INT4, groups of {group}: {len(meant)} layers, ")
    assert read.quantization.algorithms() == set()


def test_int4_as_engines_take_it_stays_packed(draft: Path) -> None:
    write_int4(draft, group=32)
    assert set(read_draft(draft).quantization.modules.values()) == {"W4A16_AWQ"}


@pytest.mark.parametrize("write", [write_mlx, write_int4])
def test_converted_and_built(write: Any, draft: Path, tmp_path: Path) -> None:
    meant = write(draft)
    converted = run("convert", draft, "-o", tmp_path / "dense", "--to", "zlab")
    assert converted.returncode == 0, converted.stderr
    assert "read as BF16" in converted.stderr
    dense = read_draft(tmp_path / "dense")
    assert (dense.stored_as, dense.quantization.algorithms()) == (None, set())
    for name, expected in meant.items():
        assert np.array_equal(as_float32(map_tensor(dense.weights[name])), expected)


def test_rows_of_a_decoded_tensor(draft: Path) -> None:
    """Rows are read from any place on, also odd ones, of which two share a byte."""
    meant = write_int4(draft)
    tensor = read_draft(draft).weights[f"{Q}.weight"]
    assert isinstance(tensor, DecodedTensor)
    for begin, end in ((0, 1), (1, 2), (1, 4), (5, 128), (3, 3)):
        rows = torch.from_numpy(tensor.decode(begin, end)).bfloat16().float().numpy()
        assert np.array_equal(rows, meant[f"{Q}.weight"][begin:end])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mode": "mxfp4"}, 'quantization.mode: expected affine, which is read, found "mxfp4"'),
        ({"bits": 3}, "quantization.bits: expected 4 or 8, found 3"),
        ({"bits": 8}, "expected a scale for each 64 of 192 columns of 128 rows"),
        ({"group_size": 32}, "expected a scale for each 32 of"),
        ({"group_size": 0}, "group_size: expected an integer from 1"),
        ({Q: {"bits": 8, "group_size": 64}}, f"tensor '{Q}.scales': expected a scale for each 64 of 64"),
    ],
)
def test_mlx_that_does_not_fit(section: dict[str, Any], words: str, draft: Path) -> None:
    write_mlx(draft)
    whole = {"group_size": 64, "bits": 4, "mode": "affine"} | section
    message = refusal(lambda: read_draft(edit_config(draft, quantization=whole, quantization_config=whole)))
    assert words in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (f"{Q}.weight", torch.zeros(128, 16, dtype=torch.int32), f"tensor '{Q}.weight': expected U32"),
        (f"{Q}.weight", torch.zeros(0, 16, dtype=torch.int32).view(torch.uint32), "expected U32 [out, in * 4 / 32]"),
        (f"{Q}.scales", torch.ones(128, 3), "expected U32 [out, in * 4 / 32]"),
        (f"{Q}.scales", torch.ones(128, 2, dtype=torch.int32), f"tensor '{Q}.scales': expected a scale for each 64"),
        (f"{Q}.biases", None, f"missing tensor {Q}.biases, part of a packed weight"),
        (f"{Q}.weight", None, f"missing tensor {Q}.weight, part of a packed weight"),
    ],
)
def test_damaged_mlx(name: str, value: torch.Tensor | None, words: str, draft: Path) -> None:
    write_mlx(draft)
    edit_tensors(draft, lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    assert words in refusal(lambda: read_draft(draft))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (f"{Q}.weight_scale", torch.ones(128, 3), f"tensor '{Q}.weight_scale': expected F32 [128, a divisor of 128]"),
        (f"{Q}.weight_scale", torch.ones(64, 1), f"tensor '{Q}.weight_scale': expected F32 [128, a divisor of 128]"),
        (f"{Q}.pre_quant_scale", torch.ones(7), f"tensor '{Q}.pre_quant_scale': expected a factor for each of 128"),
    ],
)
def test_damaged_int4(name: str, value: torch.Tensor, words: str, draft: Path) -> None:
    write_int4(draft)
    edit_tensors(draft, lambda tensors: tensors.update({name: value}))
    assert words in refusal(lambda: read_draft(draft))
