# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity are found in weights of every type, and refused by quantize and build."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_trt.checkpoint import finite
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.safetensors_file import read_tensors
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import edit_tensors, refusal

INF, NAN = float("inf"), float("nan")


def check(file: Path, tensor: torch.Tensor) -> str | None:
    save_file({"w": tensor}, file)
    try:
        check_finite(read_tensors(file).values())
    except CheckpointError as error:
        return error.message
    return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_a_small_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """All at once must be refused at the first bad one, and all that torch calls finite must pass."""
    width = dtype.itemsize
    bits = torch.arange(2 ** (8 * width), dtype=torch.int32).to(torch.int16 if width == 2 else torch.int8)
    values = bits.view(dtype)
    good = values.to(torch.float32).isfinite()
    assert check(tmp_path / "a.safetensors", values[good].clone()) is None
    for index in (~good).nonzero().flatten().tolist():
        if width == 1 or index % 997 == 0:  # only samples of the 16-bit values
            kind = "infinity" if values[index].to(torch.float32).isinf() else "NaN"
            message = check(tmp_path / "a.safetensors", torch.cat([values[good][:5], values[index : index + 1]]))
            assert message is not None
            assert message.endswith(f"tensor 'w': expected finite weights, found {kind} at [5]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [INF, -INF, NAN, -NAN])
def test_large_types(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.tiny, -0.0, info.smallest_normal / 4], dtype=dtype)
    assert check(tmp_path / "a.safetensors", extremes) is None
    message = check(tmp_path / "a.safetensors", torch.tensor([[0.0, 1.0], [value, NAN]], dtype=dtype))
    assert message is not None
    assert f"found {'NaN' if value != value else 'infinity'} at [1, 0]" in message


def test_in_a_later_chunk_and_in_a_scalar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "CHUNK", 8)
    tensor = torch.ones(5, 7)
    tensor[4, 2] = NAN
    assert str(check(tmp_path / "a.safetensors", tensor)).endswith("found NaN at [4, 2]")
    assert str(check(tmp_path / "a.safetensors", torch.tensor(INF))).endswith("found infinity at [0]")
    assert check(tmp_path / "a.safetensors", torch.ones(0, 3)) is None
    assert check(tmp_path / "a.safetensors", torch.full((3,), 255, dtype=torch.uint8)) is None


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.self_attn.o_proj.weight"])
def test_quantize_and_build_refuse_it_anywhere(name: str, draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].flatten()[1] = NAN

    edit_tensors(draft_dir, spoil)
    draft, target, output = read_draft(draft_dir), read_target(target_dir), tmp_path / "out"
    for write in (
        lambda: quantize_checkpoint(draft, load_recipe("nvfp4"), output),
        lambda: build_engine(BuildOptions(draft=draft, draft_name="x", target=target, output=output)),
    ):
        message = refusal(write)
        assert f"{draft_dir / 'model.safetensors'}: tensor '{name}': expected finite weights, found NaN at [" in message
        assert not output.exists()
