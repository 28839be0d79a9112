# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files tensor by tensor, so that a checkpoint never has to fit in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt.checkpoint.decoded_tensor import DecodedTensor
from dflash_trt.checkpoint.safetensors_file import BITS_PER_ELEMENT, MAX_HEADER_BYTES, StoredTensor
from dflash_trt.errors import CheckpointError
from dflash_trt.files.read import open_file

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""dtype and shape by tensor name."""
CHUNK_BYTES = 1 << 20  # the pages of 16 MiB would be mapped anew for each chunk: three times the CPU time
PRODUCER_KEY = "producer"
PRODUCER = f"dflash-trt {__version__}"
"""Header entry of files that dflash-trt wrote, and may therefore replace."""


class SafetensorsWriter(AbstractContextManager["SafetensorsWriter", None]):
    """A file whose tensors are written in any order; their layout is given first, as the header precedes them."""

    def __init__(
        self,
        file: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] = MappingProxyType({}),
        written: Collection[str] = (),
    ) -> None:
        """`tensors` maps names, in file order, to dtype in safetensors' spelling and shape.

        `written` names tensors that `file` already holds from an earlier writer of the same layout.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        self._places: dict[str, tuple[int, int]] = {}
        position = 0
        for name, (dtype, shape) in tensors.items():
            begin, position = position, position + math.prod(shape) * BITS_PER_ELEMENT[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, position]}
            self._places[name] = (begin, position - begin)
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._data_begin = 8 + len(encoded)
        for name in written:
            del self._places[name]
        self._output = file.open("r+b" if written else "wb")
        self._output.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, values: NDArray[Any] | np.float32) -> None:
        """Writes one tensor, which must not be written yet."""
        begin, num_bytes = self._places.pop(name)
        assert values.nbytes == num_bytes, (name, values.nbytes, num_bytes)
        self._output.seek(self._data_begin + begin)
        self._output.write(np.ascontiguousarray(values).data)

    def flush(self) -> None:
        """Flushes all writes to disk."""
        self._output.flush()
        os.fsync(self._output.fileno())

    def copy(self, tensor: StoredTensor) -> None:
        """Writes a tensor of another file byte for byte, or decoded where it is packed.

        Raises OSError when that file is shorter than it was.
        """
        begin, remaining = self._places.pop(tensor.name)
        self._output.seek(self._data_begin + begin)
        if isinstance(tensor, DecodedTensor):
            for block in tensor.blocks():
                self._output.write(block.data)
            return
        with tensor.file.open("rb") as source:
            source.seek(tensor.offset)
            while remaining:
                chunk = source.read(min(remaining, CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{tensor.file}: tensor {tensor.name!r} ended {remaining} bytes early")
                self._output.write(chunk)
                remaining -= len(chunk)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        assert kind is not None or not self._places, f"not written: {sorted(self._places)}"


def write_safetensors(file: Path, tensors: Iterable[StoredTensor]) -> None:
    """Writes tensors in the given order, copied byte for byte."""
    sources = {tensor.name: tensor for tensor in tensors}
    with SafetensorsWriter(file, {name: (tensor.dtype, tensor.shape) for name, tensor in sources.items()}) as writer:
        for tensor in sources.values():
            writer.copy(tensor)


def aligned(layout: Layout) -> Layout:
    """`layout` with wide elements first, then by name: the safetensors library's order, which aligns every tensor."""
    return dict(sorted(layout.items(), key=lambda item: (-BITS_PER_ELEMENT[item[1][0]], item[0])))


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file's header; empty for files without one and of other kinds."""
    try:
        with open_file(file, CheckpointError) as stream:
            length = int.from_bytes(stream.read(8), "little")
            return msgspec.json.decode(stream.read(min(length, MAX_HEADER_BYTES)), type=_Header).metadata
    except (CheckpointError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def is_ours(file: Path) -> bool:
    """Whether dflash-trt wrote a safetensors file, by its header."""
    return metadata(file).get(PRODUCER_KEY, "").startswith("dflash-trt ")
