# SPDX-License-Identifier: Apache-2.0
"""Drafts that llm-compressor quantised are read as BF16, and damaged ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.finite import check_finite
from tests.checkpoint.compressed_samples import Meant, claims, write_compressed, write_packed
from tests.checkpoint.dialect_samples import write_laguna
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.cli.commands import run
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes(hidden=64, intermediate=96)
Q = "layers.0.self_attn.q_proj"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=SIZES, layer_types=["full_attention"])


def check_meant(draft: DraftCheckpoint, meant: Meant, *, rtol: float = 0, atol: float = 0) -> None:
    assert meant.keys() == {f"{module}.weight" for module in draft.spec.linear_modules()}
    for name, expected in meant.items():
        found = as_float32(map_tensor(draft.weights[name]))
        assert np.allclose(found, expected, rtol=rtol, atol=atol), name
        assert np.abs(expected).max() > 0
    check_finite(draft.weights.values())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(bits: int, symmetric: bool, draft: Path) -> None:
    plain = read_draft(draft)
    before = {name: map_tensor(tensor).tobytes() for name, tensor in plain.weights.items()}
    meant = write_packed(draft, bits=bits, symmetric=symmetric)
    read = read_draft(draft)
    check_meant(read, meant)
    assert read.spec == plain.spec
    assert not read.quantization.algorithms()
    scheme = f"int{bits}, groups of 16, {'symmetric' if symmetric else 'with zero points'}"
    assert str(read.stored_as).startswith(f"compressed-tensors pack-quantized ({scheme}): 8 layers,")
    assert all(map_tensor(read.weights[name]).tobytes() == before[name] for name in before.keys() - meant.keys())


def test_rows_that_are_fused(tmp_path: Path) -> None:
    """q, k and v are rows of one packed tensor."""
    draft = write_laguna(tmp_path / "draft")
    meant = write_packed(draft)
    q, k, v = (as_float32(map_tensor(read_draft(draft).weights[f"layers.1.self_attn.{x}_proj.weight"])) for x in "qkv")
    assert np.array_equal(np.concatenate([q, k, v]), meant["layers.1.self_attn.qkv_proj.weight"])


def test_groups_by_name_and_expression(draft: Path) -> None:
    write_packed(draft)
    config = json.loads((draft / "config.json").read_text())["quantization_config"]
    group, wrong = config["config_groups"]["group_0"], claims("pack-quantized", num_bits=8, group_size=16)
    eight = wrong["config_groups"]["group_0"]
    config["config_groups"] = {
        "a": eight | {"targets": ["Linear"]}, "b": eight | {"targets": [r"re:.*self_attn.*"]},
        "c": group | {"targets": [Q, r"re:(fc$|.*mlp.*|.*\.[kvo]_proj)"]},
    }  # fmt: skip
    edit_config(draft, quantization_config=config)
    assert "expected I32" in refusal(lambda: read_draft(draft)) or "words" in refusal(lambda: read_draft(draft))
    config["config_groups"] |= {"b": eight | {"targets": ["re:nothing"]}}
    config["config_groups"]["c"]["targets"] += ["re:.*q_proj"]
    read_draft(edit_config(draft, quantization_config=config))


def damaged(draft: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    write_packed(draft, symmetric=False)
    return refusal(lambda: read_draft(edit_tensors(draft, change)))


def test_damaged_tensors(draft: Path) -> None:
    def replaced(name: str, value: torch.Tensor) -> str:
        return damaged(draft, lambda tensors: tensors.update({f"{Q}.{name}": value}))

    original = draft / "model.safetensors"
    content = original.read_bytes()
    expected = "expected the shape of 'layers.0.self_attn.q_proj.weight_packed', 64 rows of 8 words, found"
    for shape in ([65, 64], [64, 72], [64, 0], [64, -(2**62)], [64, 2**62]):
        original.write_bytes(content)
        assert f"{expected} {shape}" in replaced("weight_shape", torch.tensor(shape))
    for name, value, words in [
        ("weight_shape", torch.tensor([64.0, 64.0]), "expected I64 [2], found F32 [2]"),
        ("weight_packed", torch.zeros(64, 8, dtype=torch.int64), "expected I32 [64, 8] for pack-quantized (int4,"),
        ("weight_packed", torch.zeros(64 * 8, dtype=torch.int32), "expected a matrix, found [512]"),
        ("weight_scale", torch.ones(64, 3), "expected BF16 or F16 or F32 [64, 4]"),
        ("weight_zero_point", torch.zeros(64, 4, dtype=torch.int32), "expected I32 [8, 4]"),
        ("weight_g_idx", torch.zeros(64, dtype=torch.int32), "(groups in the order of activations)"),
    ]:
        original.write_bytes(content)
        assert words in replaced(name, value)
    original.write_bytes(content)
    write_packed(draft)
    point = torch.zeros(8, 4, dtype=torch.int32)
    surplus = edit_tensors(draft, lambda tensors: tensors.update({f"{Q}.weight_zero_point": point}))
    assert "symmetric): expected no weight_zero_point, found" in refusal(lambda: read_draft(surplus))
    for name in ("weight_scale", "weight_zero_point", "weight_shape"):
        original.write_bytes(content)
        message = damaged(draft, lambda tensors: tensors.pop(f"{Q}.{name}"))  # noqa: B023
        assert f"missing tensor '{Q}.{name}', without which '{Q}.weight_packed' cannot be read" in message


def test_scales_that_are_not_finite(draft: Path, tmp_path: Path) -> None:
    write_packed(draft)
    edit_tensors(draft, lambda tensors: tensors[f"{Q}.weight_scale"][5].fill_(float("nan")))
    for command in (["convert", "--to", "zlab"], ["quantize", "--recipe", "fp8"]):
        shown = run(command[0], draft, "-o", tmp_path / "written", *command[1:])
        assert shown.returncode == 1
        assert f"tensor '{Q}.weight': expected finite weights, found NaN at [5, 0]" in shown.stderr


CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"num_bits": 3}, "expected a scheme of compressed-tensors with 4 or 8 bits, found compressed-tensors pack-q"),
    ({"group_size": 0}, "sizes of groups and blocks are 1 to"),
    ({"group_size": 2**40}, "sizes of groups and blocks are 1 to"),
    ({"group_size": -7}, "sizes of groups and blocks are 1 to"),
    ({"group_size": 40}, "expected columns in whole groups, found 192 columns for groups of 40"),
    ({"group_size": 10**9}, "expected columns in whole groups"),
    ({"group_size": 32}, "expected BF16 or F16 or F32 [64, 6]"),
    ({"type": "float"}, "expected a type and width of this format, found float4, groups of 16"),
    ({"strategy": "block", "block_structure": "x"}, "expected a scheme"),
    ({"strategy": "block", "block_structure": None}, "sizes of groups and blocks"),
    ({"dynamic": True}, "expected a scheme"),
    ({"actorder": "group"}, "expected a scheme"),
    ({"rotation": 3}, "rotation"),
]


@pytest.mark.parametrize(("changed", "words"), CLAIMS)
def test_claims_that_are_not_read(changed: dict[str, Any], words: str, draft: Path) -> None:
    write_packed(draft)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16} | changed
    message = refusal(lambda: read_draft(edit_config(draft, quantization_config=claims("pack-quantized", **weights))))
    assert words in message


SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"format": "marlin-24"}, "(compressed-tensors marlin-24): expected one of pack-quantized"),
    ({"format": "mxfp4-pack-quantized"}, "expected one of pack-quantized"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config: expected none, as it changes"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: expected none"),
    ({"rotated": True}, "rotated"),
    ({"config_groups": {}}, "expected a group that names fc"),
    ({"config_groups": [3]}, "expected a scheme"),
]


@pytest.mark.parametrize(("changed", "words"), SECTIONS)
def test_sections_that_are_not_read(changed: dict[str, Any], words: str, draft: Path) -> None:
    write_packed(draft)
    section = claims("pack-quantized", num_bits=4, strategy="group", group_size=16) | changed
    message = refusal(lambda: read_draft(edit_config(draft, quantization_config=section)))
    assert words in message
    assert "vLLM serves this draft" in message


def test_scales_of_activations_and_context(draft: Path) -> None:
    meant = write_packed(draft)
    more = {f"{Q}.input_scale": torch.ones(1), "layers.1.self_attn.k_scale": torch.ones(1)}
    edit_tensors(draft, lambda tensors: tensors.update(more))
    read = read_draft(draft)
    check_meant(read, meant)
    assert str(read.stored_as).endswith("; scales of activations and context are not used")
    edit_tensors(draft, lambda tensors: tensors.update({"layers.1.self_attn.scale": torch.ones(1)}))
    assert "found tensor 'layers.1.self_attn.scale' besides" in refusal(lambda: read_draft(draft))


def test_packed_weights_without_claims(draft: Path) -> None:
    write_packed(draft)
    edit_config(draft, "quantization_config")
    message = refusal(lambda: read_draft(draft))
    assert "config.json: missing quantization_config, the scheme by which 'fc.weight_packed' is packed" in message


def test_the_status_says_nothing_of_the_tensors(draft: Path) -> None:
    """Older releases call what they packed frozen."""
    meant = write_packed(draft)
    edit_config(draft, quantization_config__quantization_status="frozen")
    check_meant(read_draft(draft), meant)


def test_claims_without_packed_weights(draft: Path) -> None:
    edit_config(draft, quantization_config=claims("pack-quantized", num_bits=4, group_size=16))
    assert "expected packed weights, found none" in refusal(lambda: read_draft(draft))


def test_converted_and_requantised(draft: Path, tmp_path: Path) -> None:
    """The converted and the requantised draft equal those of a dense draft with the same weights."""
    meant = write_packed(draft)
    source = draft.rename(tmp_path / "packed")
    shown = run("convert", source, "-o", tmp_path / "dense", "--to", "zlab")
    assert shown.returncode == 0, shown.stderr
    assert f"{source}: compressed-tensors pack-quantized (int4, groups of 16" in shown.stderr
    dense = read_draft(tmp_path / "dense")
    check_meant(dense, meant)
    assert dense.stored_as is None
    assert "quantization_config" not in dense.config
    for name in ("packed", "dense"):
        shown = run("quantize", tmp_path / name, "-o", tmp_path / f"{name}-fp8", "--recipe", "fp8")
        assert shown.returncode == 0, shown.stderr
        assert ("read as BF16" in shown.stderr) == (name == "packed")
    ours, theirs = ((tmp_path / f"{name}-fp8" / "model.safetensors").read_bytes() for name in ("packed", "dense"))
    assert ours == theirs


SCHEMES: list[tuple[str, bool | None, dict[str, Any]]] = [
    *[("pack-quantized", None, {"num_bits": bits, "strategy": "group", "group_size": 16, "symmetric": symmetric})
      for bits in (4, 8) for symmetric in (True, False)],
    *[("pack-quantized", None, {"num_bits": bits, "strategy": "channel", "symmetric": symmetric})
      for bits in (4, 8) for symmetric in (True, False)],
    *[("pack-quantized", None, {"num_bits": bits, "strategy": strategy, "symmetric": symmetric} | more)
      for bits in (4, 8) for symmetric in (True, False)
      for strategy, more in (("tensor", {}), ("block", {"block_structure": [24, 16]}))],
    ("int-quantized", True, {"num_bits": 4, "strategy": "channel"}),
    ("int-quantized", True, {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    ("int-quantized", None, {"num_bits": 8, "strategy": "block", "block_structure": [24, 16], "symmetric": False}),
    ("int-quantized", None, {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    ("int-quantized", True, {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", True, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", False, {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", False, {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", True, {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", True, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 40]}),
    ("naive-quantized", None, {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("nvfp4-pack-quantized", None, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                    "scale_dtype": "torch.float8_e4m3fn"}),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "dynamic", "arguments"), SCHEMES)
def test_against_the_package(
    kind: str, dynamic: bool | None, arguments: dict[str, Any], dtype: torch.dtype, draft: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    before = load_file(draft / "model.safetensors")
    meant = write_compressed(draft, kind, dtype, dynamic=dynamic, **arguments)
    read = read_draft(draft)
    is_rounded_alike = dtype == torch.bfloat16  # the package rounds to the scales' type
    check_meant(read, meant, rtol=0 if is_rounded_alike else 2**-8, atol=0 if is_rounded_alike else 2**-25)
    assert kind in str(read.stored_as)
    for name, expected in meant.items():  # close to the draft that was quantised
        assert np.abs(expected - before[name].float().numpy()).mean() < 0.2 * before[name].float().abs().mean()
    assert SECTION in read.config


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*", "(.+)+x", r"(a|aa)+$", r"(.*)\1", "(?P<x>.*)(?P=x)", ".*.*.*.*.*x", "(?x)(a*) *", "(?:a*){9}",
        r"\\(a*)*", "[)](a*)+", "x" * 2000,
    ],
)  # fmt: skip
def test_regular_expressions_without_a_bound(pattern: str, tmp_path: Path) -> None:
    """They are refused before they are tried on any name."""
    directory = write_random_draft(tmp_path / "draft", dialect="qwen3")
    write_packed(directory)
    config = json.loads((directory / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [f"re:{pattern}"]
    (directory / "config.json").write_text(json.dumps(config))
    assert "expected a regular expression with at most 4 repeats" in refusal(lambda: read_draft(directory))
