# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors headers (https://github.com/huggingface/safetensors#format), never the weights.

The `safetensors` package does not expose offsets, and the ONNX graphs point at them as external data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from dflash_trt.errors import CheckpointError, cut, shown
from dflash_trt.files.json_file import json_object
from dflash_trt.files.read import NUM_BYTES, foreign_content, open_file

BITS_PER_ELEMENT = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors library enforces
MAX_DIMENSIONS = 16  # far beyond any weight
MAX_FILE_BYTES = 2**50  # keeps sizes and offsets within 64 bits
REDOWNLOAD = "download or copy the file again"


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a checkpoint and the place of its bytes."""

    name: str
    dtype: str
    """safetensors spelling: BF16, F16, F32, F8_E4M3, U8, ..."""
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Absolute position of the first byte in `file`."""
    num_bytes: int

    def error(self, expected: str, found: str = "", hint: str | None = None) -> CheckpointError:
        """The error for the tensor: the expectation and the finding, by default its dtype and shape."""
        found = found or f"{self.dtype} {list(self.shape)}"
        place = f"{self.file}: tensor {shown(self.name)}"
        return CheckpointError(f"{place}: expected {expected}, found {found}", hint=hint)


Weights = dict[str, StoredTensor]
Expected = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""Allowed dtypes and shape by tensor name."""


def read_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name, in file order; CheckpointError for a damaged or truncated one."""
    with open_file(file, CheckpointError) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        raw = _read_header(file, stream, file_bytes)
    header = json_object(raw, file, CheckpointError, what="a JSON object as header", hint=REDOWNLOAD)
    metadata = header.pop("__metadata__", {})
    try:
        msgspec.convert(metadata, dict[str, str])
    except msgspec.ValidationError:
        raise damaged(file, f"__metadata__: expected a map of strings, found {shown(metadata)}") from None
    data_begin = 8 + len(raw)
    tensors = {name: read_entry(file, name, entry, data_begin) for name, entry in header.items()}
    _check_coverage(file, tensors, data_begin, file_bytes)
    return tensors


def check_tensors(
    where: Path, expected: Expected, tensors: Mapping[str, StoredTensor], *, described_by: str, hint: str | None = None
) -> None:
    """Raises CheckpointError for a tensor of `where` that is missing, unexpected, or of another shape or dtype."""
    if missing := sorted(expected.keys() - tensors.keys()):
        _, shape = expected[missing[0]]
        raise CheckpointError(
            f"{where}: missing tensor {missing[0]!r} {list(shape)} ({len(missing)} of {len(expected)} missing)",
            hint=hint,
        )
    if unused := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{tensors[unused[0]].file}: expected the {len(expected)} tensors that {described_by} describes, found"
            f" tensor {unused[0]!r} besides ({len(unused)} that nothing would use)",
            hint=hint,
        )
    for name, (dtypes, shape) in expected.items():
        if (tensor := tensors[name]).shape != shape:
            raise tensor.error(f"shape {list(shape)}", str(list(tensor.shape)), hint)
        if tensor.dtype not in dtypes:
            raise tensor.error(f"dtype {' or '.join(dtypes)}", tensor.dtype, hint)


def damaged(file: Path, problem: str) -> CheckpointError:
    """The error for a file that is not as its writer left it."""
    return CheckpointError(f"{file}: {problem}", hint=REDOWNLOAD)


def _read_header(file: Path, stream: BinaryIO, file_bytes: int) -> bytes:
    refuse_foreign(file, stream.read(NUM_BYTES))
    stream.seek(0)
    header_bytes = int.from_bytes(stream.read(8), "little")
    if file_bytes < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
        found = f"{file_bytes} bytes whose first 8 announce a header of {header_bytes} bytes"
        raise damaged(file, f"expected a safetensors file, found {found}")
    return stream.read(header_bytes)


def refuse_foreign(file: Path, begin: bytes) -> None:
    """Raises CheckpointError for a file that begins as a pointer of Git LFS or a web page does."""
    if (found := foreign_content(begin)) is not None:
        raise CheckpointError(f"{file} is {found[0]}, not a file of a checkpoint", hint=found[1])


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_entry(file: Path, name: str, entry: object, data_begin: int) -> StoredTensor:
    """One entry of a header: dtype, shape and data_offsets; CheckpointError for values that contradict each other."""
    where = f"tensor {shown(name)}"
    try:
        parsed = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        found = f"{shown(entry)} ({error})"
        raise damaged(file, f"{where}: expected dtype, shape and data_offsets, found {found}") from None
    begin, end = parsed.data_offsets
    bits = BITS_PER_ELEMENT.get(parsed.dtype)
    if bits is None:
        raise CheckpointError(
            f"{file}: {where}: dtype: expected one of {', '.join(BITS_PER_ELEMENT)}, found {shown(parsed.dtype)}"
        )
    if len(parsed.shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_FILE_BYTES for size in parsed.shape):
        sizes = f"{MAX_DIMENSIONS} dimensions of 0 to {MAX_FILE_BYTES} elements"
        raise damaged(file, f"{where}: shape: expected at most {sizes}, found {cut(str(list(parsed.shape)))}")
    expected_bytes = math.prod(parsed.shape) * bits // 8
    if end - begin != expected_bytes:
        expected = f"{expected_bytes} bytes for {parsed.dtype} {list(parsed.shape)}"
        raise damaged(file, f"{where}: expected {expected}, found data_offsets {[begin, end]}")
    return StoredTensor(
        name=name,
        dtype=parsed.dtype,
        shape=parsed.shape,
        file=file,
        offset=data_begin + begin,
        num_bytes=expected_bytes,
    )


def _check_coverage(file: Path, tensors: dict[str, StoredTensor], data_begin: int, file_bytes: int) -> None:
    """Raises CheckpointError unless the tensors cover the data exactly: no hole, overlap, missing or surplus byte."""
    position = data_begin
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != position:
            found = f"at byte {tensor.offset}: the header has a hole or an overlap"
            raise tensor.error(f"at byte {position}", found, REDOWNLOAD)
        position += tensor.num_bytes
    if position != file_bytes:
        kind = "truncated" if file_bytes < position else "followed by foreign bytes"
        raise damaged(file, f"expected {position} bytes, found {file_bytes}: the file is {kind}")
