# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF headers (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), never the weights.

The reader of the package gguf is not used: it trusts counts and reads past the end of a damaged file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.checkpoint.gguf_tensor import gguf_tensor
from dflash_trt.checkpoint.safetensors_file import (
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    StoredTensor,
    damaged,
    refuse_foreign,
)
from dflash_trt.errors import CheckpointError, shown
from dflash_trt.files.read import NUM_BYTES, open_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the types of values."""
STRING, ARRAY = 8, 9
MAX_KEPT = 4096
"""Values of an array that are kept; longer arrays and those of strings are replaced by their length."""
MAX_DIMENSIONS = 4


class Gguf(NamedTuple):
    """The header of a GGUF file."""

    metadata: dict[str, object]
    """Values by key; for arrays of strings and long arrays, their length."""
    tensors: dict[str, StoredTensor]
    """Tensors by the names in the file, row-major like torch's; quantised ones are decoded on read."""


class _Header:
    """Reads a file from the front; raises CheckpointError where a count exceeds its bytes."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self.position = file, data, 0

    def value(self, letter: str) -> Any:
        return self.values(letter, 1)[0]

    def values(self, letter: str, count: int) -> tuple[Any, ...]:
        begin = self._skip(count * struct.calcsize(f"<{letter}"))
        return struct.unpack_from(f"<{count}{letter}", self._data, begin)

    def text(self) -> str:
        length = self.value("Q")
        begin = self._skip(length)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.error("text in UTF-8", f"other bytes at {begin}") from None

    def field(self) -> object:
        """A value of any type."""
        kind = self.value("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return _shortest(self.value(self._letter(kind)), kind)
        element, count = self.value("I"), self.value("Q")
        if element == STRING:
            for _ in range(count):
                self._skip(self.value("Q"))
            return count
        letter = self._letter(element)
        if count > MAX_KEPT:
            self._skip(count * struct.calcsize(f"<{letter}"))
            return count
        return [_shortest(value, element) for value in self.values(letter, count)]

    def error(self, expected: str, found: str) -> CheckpointError:
        return damaged(self._file, f"expected {expected}, found {found}")

    def _letter(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.error("a type of value from 0 to 12, without arrays in arrays", str(kind))
        return SCALARS[kind]

    def _skip(self, num_bytes: int) -> int:
        begin, self.position = self.position, self.position + num_bytes
        if self.position > MAX_HEADER_BYTES:
            raise self.error(f"at most {MAX_HEADER_BYTES} bytes of header", "more")
        if self.position > len(self._data):
            raise self.error(f"{num_bytes} bytes at {begin}", f"the end of the file at {len(self._data)}")
        return begin


def _shortest(value: Any, kind: int) -> Any:
    """A FLOAT32 as the shortest decimal that rounds to it: 1e-06, not 9.99999997475e-07."""
    if SCALARS[kind] != "f":
        return value
    import numpy as np

    return float(str(np.float32(value)))


def read_gguf(file: Path) -> Gguf:
    """The header of a GGUF file.

    Raises CheckpointError for a damaged file and types of tensors that are not read; MissingDependencyError for
    quantised tensors without the package gguf.
    """
    with open_file(file, CheckpointError) as stream:
        try:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise damaged(file, "expected a GGUF file, found an empty one") from None
    with data:
        refuse_foreign(file, data[:NUM_BYTES])
        header = _Header(file, data)
        if bytes(header.values("B", 4)) != MAGIC or header.value("I") not in VERSIONS:
            raise header.error(f"a GGUF file of version {' or '.join(map(str, VERSIONS))}", shown(data[:8]))
        num_tensors, num_keys = header.values("Q", 2)
        metadata = _read_metadata(header, num_keys)
        entries = _read_entries(header, num_tensors)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (1 << i for i in range(3, 21)):
            raise header.error("general.alignment, a power of 2 from 8 on", shown(alignment))
        begin = -(-header.position // alignment) * alignment
        tensors = {n: gguf_tensor(file, n, shape, kind, begin + offset) for n, (shape, kind, offset) in entries.items()}
        _check_places(header, len(data), begin, tensors, {n: offset for n, (_, _, offset) in entries.items()})
    return Gguf(metadata, tensors)


def _read_metadata(header: _Header, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = header.text()
        if key in metadata:
            raise header.error(f"the key {shown(key)} once", "it twice")
        metadata[key] = header.field()
    return metadata


Entry = tuple[tuple[int, ...], int, int]


def _read_entries(header: _Header, count: int) -> dict[str, Entry]:
    """Shape, type and offset of each tensor, by name."""
    entries: dict[str, Entry] = {}
    for _ in range(count):
        name, num_dimensions = header.text(), header.value("I")
        if name in entries or not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise header.error(f"a tensor {shown(name)} of 1 to {MAX_DIMENSIONS} dimensions, once", "others")
        shape = header.values("Q", num_dimensions)[::-1]
        if not all(1 <= size <= MAX_FILE_BYTES for size in shape):
            raise header.error(f"sizes of tensor {shown(name)} from 1 to {MAX_FILE_BYTES}", str(list(shape)))
        entries[name] = (shape, header.value("I"), header.value("Q"))
    return entries


def _check_places(
    header: _Header, file_bytes: int, begin: int, tensors: dict[str, StoredTensor], offsets: dict[str, int]
) -> None:
    """Raises CheckpointError where tensors overlap or extend past the end of the file."""
    end = begin
    for name in sorted(offsets, key=offsets.__getitem__):
        size = getattr(tensors[name], "stored_bytes", tensors[name].num_bytes)
        place = begin + offsets[name]
        if place < end:
            raise header.error(f"tensor {shown(name)} at byte {end} or later", f"it at {place}: tensors overlap")
        end = place + size
    if end > file_bytes:
        raise header.error(f"{end} bytes", f"{file_bytes}: the file is truncated")
