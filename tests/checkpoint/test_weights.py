# SPDX-License-Identifier: Apache-2.0
"""A directory's weights: one file, shards with an index, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.weights import read_weights, weight_files
from tests.checkpoint.samples import read_index, refusal, shard, write_index


def test_single_file(draft_dir: Path) -> None:
    tensors = read_weights(draft_dir)
    assert list(tensors) == sorted(load_file(draft_dir / "model.safetensors"))
    assert weight_files(read_weights(draft_dir)) == [draft_dir / "model.safetensors"]


def test_shards_are_the_same_tensors(draft_dir: Path) -> None:
    single = {name: (t.dtype, t.shape, t.num_bytes) for name, t in read_weights(draft_dir).items()}
    shard(draft_dir, num_shards=3)
    sharded = read_weights(draft_dir)
    assert {name: (t.dtype, t.shape, t.num_bytes) for name, t in sharded.items()} == single
    assert list(sharded) == sorted(sharded)
    assert [file.name for file in weight_files(read_weights(draft_dir))] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]


def test_single_file_wins_over_an_index_as_in_transformers(draft_dir: Path) -> None:
    write_index(draft_dir, {"anything": "model-00001-of-00002.safetensors"})
    assert {t.file.name for t in read_weights(draft_dir).values()} == {"model.safetensors"}


def test_missing_shard(draft_dir: Path) -> None:
    shard(draft_dir)
    (draft_dir / "model-00002-of-00002.safetensors").unlink()
    message = refusal(lambda: read_weights(draft_dir))
    assert "model.safetensors.index.json: missing shard model-00002-of-00002.safetensors" in message
    assert "hint: download" in message


def test_tensor_only_in_the_index(draft_dir: Path) -> None:
    shard(draft_dir)
    write_index(draft_dir, read_index(draft_dir) | {"ghost": "model-00001-of-00002.safetensors"})
    message = refusal(lambda: read_weights(draft_dir))
    assert "missing tensor 'ghost' in model-00001-of-00002.safetensors" in message
    assert "1 missing in all" in message


def test_tensor_only_in_a_shard(draft_dir: Path) -> None:
    shard(draft_dir)
    weight_map = read_index(draft_dir)
    del weight_map["fc.weight"]
    write_index(draft_dir, weight_map)
    message = refusal(lambda: read_weights(draft_dir))
    assert "weight_map: 'fc.weight': expected model-0000" in message
    assert "found None" in message


def test_tensor_in_another_shard_than_the_index_says(draft_dir: Path) -> None:
    shard(draft_dir)
    weight_map = read_index(draft_dir)
    write_index(draft_dir, weight_map | {"fc.weight": "model-00002-of-00002.safetensors"})
    assert weight_map["fc.weight"] == "model-00001-of-00002.safetensors"
    message = refusal(lambda: read_weights(draft_dir))
    assert "'fc.weight': expected model-00001-of-00002.safetensors" in message
    assert "found 'model-00002-of-00002.safetensors'" in message


def test_tensor_in_two_shards(draft_dir: Path) -> None:
    shard(draft_dir)
    second = draft_dir / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"fc.weight": torch.zeros(1)}, second)
    message = refusal(lambda: read_weights(draft_dir))
    assert "'fc.weight': expected model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "model.bin"]
)
def test_index_points_elsewhere(name: str, draft_dir: Path) -> None:
    write_index(draft_dir, {"fc.weight": name})
    (draft_dir / "model.safetensors").rename(draft_dir.parent / "model.safetensors")
    message = refusal(lambda: read_weights(draft_dir))
    assert message.startswith(f"{draft_dir / 'model.safetensors.index.json'}: weight_map: ")
    assert f"expected the name of a .safetensors file in the same directory, found {name!r}" in message


def test_index_names_what_cannot_be_a_file(draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").unlink()
    for name in ("a\0.safetensors", "\x1b[2J.safetensors", f"{'a' * 300}.safetensors"):
        write_index(draft_dir, {"fc.weight": name})
        message = refusal(lambda: read_weights(draft_dir))
        assert "weight_map: expected the name of a .safetensors file in the same directory, found '" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a JSON object with a weight_map"),
        (b"[]", "a JSON object with a weight_map"),
        (b"{}", "weight_map: expected an object of strings"),
        (b'{"weight_map": []}', "weight_map: expected an object of strings"),
        (b'{"weight_map": {"a": 1}}', "weight_map: expected an object of strings"),
        (b"\xff", "a JSON object with a weight_map"),
        (b'{"weight_map":' * 10**5, "a JSON object with a weight_map"),
    ],
)
def test_index_is_no_index(content: bytes, expected: str, draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").unlink()
    (draft_dir / "model.safetensors.index.json").write_bytes(content)
    message = refusal(lambda: read_weights(draft_dir))
    assert message.startswith(f"{draft_dir / 'model.safetensors.index.json'}: ")
    assert expected in message


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "ckpt"])
def test_pickles_are_refused(suffix: str, draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").rename(draft_dir / f"pytorch_model.{suffix}")
    message = refusal(lambda: read_weights(draft_dir))
    assert f"found pickle weights (pytorch_model.{suffix})" in message
    assert "hint: convert them to safetensors" in message


def test_safetensors_are_read_where_a_pickle_stands_too(draft_dir: Path) -> None:
    (draft_dir / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert {t.file.name for t in read_weights(draft_dir).values()} == {"model.safetensors"}


def test_no_weights(tmp_path: Path) -> None:
    message = refusal(lambda: read_weights(tmp_path))
    assert "missing model.safetensors or model.safetensors.index.json" in message
    assert "hint: check the path" in message


def test_a_directory_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "missing model.safetensors or" in refusal(lambda: read_weights(tmp_path))
