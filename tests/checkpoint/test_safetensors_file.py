# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files are read as the library reads them; damaged ones are refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load as load_with_library
from safetensors.numpy import save as save_with_library

from dflash_trt.checkpoint.safetensors_file import REDOWNLOAD, read_tensors
from dflash_trt.errors import CheckpointError
from tests.checkpoint.samples import Header, refusal, write_raw

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
    [("empty", "expected a safetensors file, found 0 bytes"), ("directory", "cannot read"), ("missing", "cannot read"),
     ("loop", "cannot read")],
)  # fmt: skip
def test_unreadable(kind: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    if kind == "empty":
        file.touch()
    elif kind == "directory":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    assert words in refusal(lambda: read_tensors(file))


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
