# SPDX-License-Identifier: Apache-2.0
"""GGUF files of drafts, as the package gguf writes them, are read as the drafts that they were made from."""

import struct
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from dflash_trt.checkpoint import gguf_tensor
from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.errors import CheckpointError, MissingDependencyError
from tests.checkpoint.gguf_samples import Type, llama_name, write_gguf
from tests.checkpoint.samples import refusal
from tests.cli.commands import run
from tests.reference.synthetic import DraftSizes, write_random_draft

SIZES = DraftSizes(hidden=64, intermediate=96)
FULL, SLIDING = "full_attention", "sliding_attention"
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 7},
    "windows, not causal": {"layer_types": [SLIDING, FULL], "sliding_window": 7, "is_causal": False},
    "DFlash2": {"dflash2": True, "layer_types": [SLIDING] * 2, "sliding_window": 7, "is_causal": False},
    "own vocabulary": {"own_vocabulary": True},
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_draft(tmp_path_factory.mktemp("draft"), dialect="qwen3", sizes=SIZES, layer_types=[FULL])


@pytest.mark.parametrize("name", DRAFTS)
def test_facts_and_tensors(name: str, tmp_path: Path) -> None:
    source = read_draft(write_random_draft(tmp_path, dialect="qwen3", sizes=SIZES, **DRAFTS[name]))
    read = read_draft(write_gguf(tmp_path, tmp_path / "draft.gguf"))
    assert read.spec == msgspec.structs.replace(source.spec, num_target_layers=None)
    assert read.weights.keys() == source.weights.keys()
    for key, tensor in source.weights.items():
        assert np.array_equal(as_float32(map_tensor(read.weights[key])), as_float32(map_tensor(tensor))), key


def test_a_dspark_draft(tmp_path: Path) -> None:
    source = read_draft(write_random_draft(tmp_path, dialect="qwen3", sizes=SIZES, dspark="vanilla"))
    file = write_gguf(tmp_path, tmp_path / "draft.gguf")
    assert "sample_from_anchor: expected true or false" in refusal(lambda: read_draft(file))
    read = read_draft(write_gguf(tmp_path, file, sample_from_anchor=True))
    assert read.spec == msgspec.structs.replace(source.spec, num_target_layers=None)
    assert not read_draft(write_gguf(tmp_path, file, sample_from_anchor=False)).spec.sample_from_anchor


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16, Type.BF16, Type.F32])
def test_every_type_is_what_the_package_decodes(kind: Type, draft: Path, tmp_path: Path) -> None:
    file = write_gguf(draft, tmp_path / "draft.gguf", kind)
    read = read_draft(file)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, tensor in read.weights.items():
        other = theirs[llama_name(name)]
        expected = gguf.dequantize(other.data, other.tensor_type).reshape(tensor.shape)
        found = as_float32(map_tensor(tensor))
        if kind in (Type.Q8_0, Type.Q4_0, Type.F16):  # BF16 has 8 bits
            assert np.allclose(found, expected, rtol=2**-8, atol=0)
        else:
            assert np.array_equal(found, expected)
    check_finite(read.weights.values())
    words = {Type.BF16: "GGUF: 8 BF16, 6 F32", Type.F32: "GGUF: 14 F32"}.get(
        kind, f"GGUF: 8 {kind.name}, 6 F32; {kind.name} read as BF16"
    )
    assert read.stored_as == words


def test_a_directory_with_a_gguf_file(draft: Path, tmp_path: Path) -> None:
    file = write_gguf(draft, tmp_path / "draft.gguf", Type.Q8_0)
    for path in (file, tmp_path):
        shown = run("inspect", path)
        assert shown.returncode == 0, shown.stderr
        assert "GGUF: 8 Q8_0, 6 F32; Q8_0 read as BF16" in shown.stdout
    (tmp_path / "other.gguf").write_bytes(b"")
    assert "found draft.gguf, other.gguf" in run("inspect", tmp_path).stderr


def test_converted_to_bf16(draft: Path, tmp_path: Path) -> None:
    file = write_gguf(draft, tmp_path / "draft.gguf", Type.Q8_0)
    (tmp_path / "beside.txt").write_text("nothing of the draft's")
    shown = run("convert", file, "-o", tmp_path / "written", "--to", "zlab")
    assert shown.returncode == 0, shown.stderr
    assert f"{file}: GGUF: 8 Q8_0, 6 F32; Q8_0 read as BF16" in shown.stderr
    source, written = read_draft(file), read_draft(tmp_path / "written")
    assert written.spec == source.spec
    assert {path.name for path in (tmp_path / "written").iterdir()} == {"config.json", "model.safetensors"}
    for name, tensor in source.weights.items():
        assert np.array_equal(map_tensor(written.weights[name]), map_tensor(tensor))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "qwen3"}, "general.architecture: expected dflash, a draft of DFlash's family, found qwen3"),
    ({"skip": ("target_layers",)}, "missing key dflash.target_layers"),
    ({"skip": ("rope.freq_base",)}, "missing key dflash.rope.freq_base"),
    ({"target_layers": [0, 2]}, "dflash.target_layers: expected ids from 1 on"),
    ({"mask_token_id": 96}, "mask_token_id: expected a token id below vocab_size 96"),
    ({"architecture": "dflash-draft"}, "hint: forks of llama.cpp write and serve it"),
    ({"expert_count": 8}, "dflash.expert_count: expected only keys that are computed"),
    ({"rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor: expected only keys that are computed"),
    ({"attention__clamp_kqv": 8.0}, "found 8.0\nhint: llama.cpp serves it"),
    ({"hyper_connection__count": 4}, "dflash.hyper_connection.count: expected only keys that are computed"),
    ({"rope__scaling__type": "linear"}, "dflash.rope.scaling.type: expected one of none, yarn"),
    ({"attention__sliding_window_pattern": [True]}, "attention.sliding_window: expected the window"),
    ({"attention__sliding_window_pattern": [True] * 3}, "expected 1 times true or false"),
    ({"attention__sliding_window_pattern": 2}, "expected a list of booleans"),
    ({"block_count": 2}, "missing tensor 'layers.1.input_layernorm.weight'"),
    ({"feed_forward_length": 95}, "expected shape [95, 64], found [96, 64]"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_what_it_cannot_be(changed: dict[str, Any], words: str, draft: Path, tmp_path: Path) -> None:
    file = write_gguf(draft, tmp_path / "draft.gguf", **changed)
    assert words in refusal(lambda: read_draft(file))


@pytest.mark.parametrize(
    "changed",
    [
        {"rope__dimension_sections": [11, 11, 10, 0]}, {"rope__scaling__finetuned": True}, {"expert_count": 0},
        {"expert_used_count": 0}, {"attention__value_length": 7}, {"rope__scaling__attn_factor": 1.0},
        {"target_hidden_size": 9}, {"attention__clamp_kqv": 0.0}, {"expert_feed_forward_length": 5},
        {"expert_shared_feed_forward_length": 5},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_metadata_that_changes_nothing(changed: dict[str, Any], draft: Path, tmp_path: Path) -> None:
    expected = read_draft(write_gguf(draft, tmp_path / "plain.gguf")).spec
    assert read_draft(write_gguf(draft, tmp_path / "changed.gguf", **changed)).spec == expected


def test_a_target_in_gguf(draft: Path, tmp_path: Path) -> None:
    file = write_gguf(draft, tmp_path / "target.gguf", architecture="qwen3")
    for command in (("inspect", file), ("inspect", draft, "--target", file)):
        shown = run(*command)
        assert shown.returncode == 1
        assert "targets and other drafters are read from safetensors alone" in shown.stderr


def test_without_the_package(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(draft, tmp_path / "draft.gguf", Type.Q8_0)
    monkeypatch.setattr(gguf_tensor, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as refused:
        read_draft(file)
    assert "pip install 'dflash-trt[run]'" in str(refused.value)
    read_draft(write_gguf(draft, file, Type.F16))  # needs no package


def test_damaged_headers(draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.gguf"
    content = write_gguf(draft, file, Type.Q8_0).read_bytes()

    def message(damaged: bytes) -> str:
        file.write_bytes(damaged)
        return refusal(lambda: read_draft(file))

    assert "found an empty one" in message(b"")
    assert "expected a GGUF file of version 2 or 3" in message(b"PK" + content[2:])
    assert "the file is truncated" in message(content[:-40])
    assert "the end of the file at 900" in message(content[:900])
    for place in (8, 16):  # numbers of tensors and of keys
        assert "expected " in message(content[:place] + struct.pack("<Q", 2**63) + content[place + 8 :])
    tokens = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    for count in (2**40, 2**63):
        assert "expected " in message(content[:tokens] + struct.pack("<Q", count) + content[tokens + 8 :])
    kinds = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert "found the type 99" in message(content[:kinds] + struct.pack("<I", 99) + content[kinds + 4 :])
    assert "found NVFP4" in message(content[:kinds] + struct.pack("<I", 40) + content[kinds + 4 :])
    name = content.index(b"blk.0.attn_v.weight")
    twice = content[:name] + b"blk.0.attn_q.weight" + content[name + 19 :]
    assert "blk.0.attn_q.weight" in message(twice)


def test_damaged_anywhere(draft: Path, tmp_path: Path) -> None:
    """A byte of the header changed, or the file cut: refused, or read as a draft."""
    rng, file = Random(7), tmp_path / "draft.gguf"
    content = write_gguf(draft, file, Type.Q8_0).read_bytes()
    header = content.index(b"blk.0.ffn_up") + 60
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(header)] = rng.randrange(256)
        file.write_bytes(damaged[: rng.choice((len(damaged), len(damaged), rng.randrange(len(damaged))))])
        with suppress(CheckpointError):
            read_draft(file)
