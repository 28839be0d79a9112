# SPDX-License-Identifier: Apache-2.0
"""A directory's weights: safetensors headers, shards with an index, finite values, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load as load_with_library
from safetensors.numpy import save as save_with_library
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import mapped
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.mapped import check_finite
from dflash_trt.checkpoint.safetensors_file import REDOWNLOAD, read_tensors
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.weights import read_weights, weight_files
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import Header, edit_tensors, read_index, refusal, shard, write_index, write_raw

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
        if width == 1 or index % 997 == 0:  # of 16 bits, some from all over
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
    monkeypatch.setattr(mapped, "CHUNK", 8)
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


DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
EXAMPLES = settings(max_examples=60)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> Header:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@dataclass(frozen=True)
class Wrong:
    """A file that must be refused, and the words that the message must have."""

    name: str
    header: Header | bytes
    words: tuple[str, ...]
    data: bytes = bytes(8)


TWICE = b'{"w": {"dtype": "F32"}, "v": {}, "w": {}}'
WRONG = [
    Wrong("not_json", b"no JSON at all", ("a JSON object as header",)),
    Wrong("name_twice", TWICE, ("'w' twice",)),
    Wrong("entry_no_object", {"w": 3}, ("'w'", "dtype, shape and data_offsets", "3")),
    Wrong("no_dtype", {"w": {"shape": [2], "data_offsets": [0, 8]}}, ("'w'", "dtype", "missing")),
    Wrong("text_shape", {"w": entry() | {"shape": ["2"]}}, ("'w'", "shape")),
    Wrong("one_offset", {"w": entry() | {"data_offsets": [0]}}, ("'w'", "data_offsets")),
    Wrong("unknown_dtype", {"w": entry("F31")}, ("'w'", "dtype", "BF16", "'F31'")),
    Wrong("negative_axis", {"w": entry(shape=(-2,))}, ("'w'", "[-2]")),
    Wrong("overflowing_shape", {"w": entry(shape=(2**62,) * 300)}, ("'w'", "at most 16 dimensions of 0 to", "...")),
    Wrong("many_dimensions", {"w": entry(shape=(1,) * 400_000)}, ("'w'", "at most 16 dimensions", "...")),
    Wrong("terminal_escape", {"\x1b[2J": 3}, (r"'\x1b[2J'",)),
    Wrong("wrong_size", {"w": entry(shape=(3,))}, ("'w'", "12 bytes", "F32 [3]", "[0, 8]")),
    Wrong("offsets_reversed", {"w": entry(offsets=(8, 0))}, ("'w'", "8 bytes", "[8, 0]")),
    Wrong("negative_offset", {"w": entry(offsets=(-8, 0))}, ("'w'", "hole or an overlap")),
    Wrong("hole", {"w": entry(offsets=(4, 12))}, ("'w'", "hole or an overlap"), bytes(12)),
    Wrong("overlap", {"w": entry(), "x": entry(offsets=(4, 12))}, ("'x'", "hole or an overlap"), bytes(12)),
    Wrong("same_bytes_twice", {"w": entry(), "x": entry()}, ("'x'", "hole or an overlap")),
    Wrong("surplus_byte", {"w": entry()}, ("followed by foreign bytes",), bytes(9)),
    Wrong("missing_byte", {"w": entry()}, ("truncated",), bytes(7)),
    Wrong("metadata_no_map", {"__metadata__": [1], "w": entry()}, ("__metadata__: expected a map of strings", "[1]")),
    Wrong("metadata_no_string", {"__metadata__": {"a": 1}, "w": entry()}, ("expected a map of strings", "'a': 1")),
    Wrong("no_tensors_but_data", {}, ("followed by foreign bytes",)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_wrong_header(wrong: Wrong, tmp_path: Path) -> None:
    file = write_raw(tmp_path / "model.safetensors", wrong.header, wrong.data)
    message = refusal(lambda: read_tensors(file))
    assert message.startswith(f"{file}: ")
    for word in wrong.words:
        assert word in message
    assert wrong.name == "unknown_dtype" or REDOWNLOAD in message


@pytest.mark.parametrize("announced", [0, 1, 17, 100_000_001, 2**63, 2**64 - 1])
def test_wrong_header_length(announced: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(announced.to_bytes(8, "little") + b'{"w": 1} 1234567')
    message = refusal(lambda: read_tensors(file))
    assert "found 24 bytes" in message
    assert f"a header of {announced} bytes" in message


@pytest.mark.parametrize(
    ("kind", "words"),
    [("empty", "a safetensors file, found 0 bytes"), ("directory", "a readable file"), ("missing", "a readable file"),
     ("loop", "a readable file")],
)  # fmt: skip
def test_unreadable(kind: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    if kind == "empty":
        file.touch()
    elif kind == "directory":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    assert f"expected {words}" in refusal(lambda: read_tensors(file))


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    arrays = {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float16)}
    content = save_with_library(arrays)
    file = tmp_path / "model.safetensors"
    for length in range(len(content)):
        file.write_bytes(content[:length])
        refusal(lambda: read_tensors(file))
    file.write_bytes(content)
    assert set(read_tensors(file)) == {"a", "b"}


ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@EXAMPLES
@given(drawn=ARRAYS, seed=st.integers(0, 2**16))
def test_reads_what_the_library_writes(drawn: dict[str, tuple[str, list[int]]], seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in drawn.items():
        values = random.integers(0, 2, size=shape)
        arrays[name] = values.astype(DTYPES[dtype])
    file = tmp_path / "model.safetensors"
    content = save_with_library(arrays, metadata={"format": "pt"})
    file.write_bytes(content)
    tensors = read_tensors(file)
    assert tensors.keys() == arrays.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (drawn[name][0], tuple(drawn[name][1]))
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == arrays[name].tobytes()


@EXAMPLES
@given(position=st.integers(0, 140), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_accepted_by_the_library_too(position: int, byte: int, tmp_path: Path) -> None:
    content = bytearray(save_with_library({"a": np.ones(3, np.float32), "b": np.ones(2, np.float16)}))
    content[min(position, len(content) - 1)] = byte
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_tensors(file)
    except CheckpointError:
        return
    try:
        library = load_with_library(bytes(content))
    except (SafetensorError, KeyError):  # a dtype that numpy lacks
        pytest.fail(f"accepted what the library refuses: {json.dumps(content.decode('latin1'))}")
    assert tensors.keys() == library.keys()


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
