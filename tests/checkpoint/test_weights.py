# SPDX-License-Identifier: Apache-2.0
"""The weights of a directory: a single file, shards with an index, and errors."""

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


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ghost": FIRST}, [f"missing tensor 'ghost' in {FIRST}", "1 missing in all"]),
        ({"fc.weight": None}, ["weight_map: 'fc.weight': expected model-0000", "found None"]),
        ({"fc.weight": SECOND}, [f"'fc.weight': expected {FIRST}", f"found '{SECOND}'"]),
    ],
)
def test_an_index_that_differs_from_its_shards(
    changed: dict[str, str | None], words: list[str], draft_dir: Path
) -> None:
    shard(draft_dir)
    weight_map = {name: file for name, file in (read_index(draft_dir) | changed).items() if file}
    write_index(draft_dir, weight_map)
    message = refusal(lambda: read_weights(draft_dir))
    for word in words:
        assert word in message


def test_tensor_in_two_shards(draft_dir: Path) -> None:
    shard(draft_dir)
    second = draft_dir / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"fc.weight": torch.zeros(1)}, second)
    message = refusal(lambda: read_weights(draft_dir))
    assert "'fc.weight': expected model-00002-of-00002.safetensors" in message


NO_NAMES = ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "model.bin"]
NO_NAMES += ["a\0.safetensors", "\x1b[2J.safetensors", f"{'a' * 300}.safetensors"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_index_points_elsewhere(name: str, draft_dir: Path) -> None:
    write_index(draft_dir, {"fc.weight": name})
    (draft_dir / "model.safetensors").rename(draft_dir.parent / "model.safetensors")
    message = refusal(lambda: read_weights(draft_dir))
    assert message.startswith(f"{draft_dir / 'model.safetensors.index.json'}: weight_map: ")
    found = repr(name)[:100] if name.isprintable() else "'"
    assert f"expected the name of a .safetensors file in the same directory, found {found}" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"[]", "a JSON object with a weight_map"), (b"{}", "weight_map: expected an object of strings"),
     (b'{"weight_map": {"a": 1}}', "weight_map: expected an object of strings")],
)  # fmt: skip
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


@pytest.mark.parametrize("is_directory", [False, True])
def test_no_weights(is_directory: bool, tmp_path: Path) -> None:
    if is_directory:
        (tmp_path / "model.safetensors").mkdir()
    message = refusal(lambda: read_weights(tmp_path))
    assert "missing model.safetensors or model.safetensors.index.json" in message
    assert "hint: check the path" in message
