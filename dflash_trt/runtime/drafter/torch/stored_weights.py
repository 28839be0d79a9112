# SPDX-License-Identifier: Apache-2.0
"""Initializers of the graphs on a device: on a CPU they stay in the engine's mapped file, a GPU gets one copy."""

from __future__ import annotations

from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from dflash_trt.errors import EngineError, shown
from dflash_trt.files.read import is_file_name
from dflash_trt.runtime.drafter.torch.operators import FP4, INT4, TORCH_TYPES, UINT4

PACKED_TYPES = (FP4, INT4, UINT4)


class StoredWeights:
    """Tensors of an engine directory; the graphs share those that several read."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._known: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()

    def read(self, initializer: TensorProto, graph: Path) -> Tensor:
        """The initializer of the file `graph`; two 4-bit codes as one UINT8.

        Raises EngineError for a type that torch lacks, and for data that is not where the graph says.
        """
        kind, dims = initializer.data_type, list(initializer.dims)
        if kind not in PACKED_TYPES and kind not in TORCH_TYPES:
            name = TensorProto.DataType.Name(kind)
            raise EngineError(f"{graph}: {shown(initializer.name)}: expected a type that torch has, found {name}")
        if initializer.data_location != TensorProto.EXTERNAL:
            return _inline(initializer).to(self._device)
        if kind in PACKED_TYPES:
            dims[-1] //= 2
        place = {entry.key: entry.value for entry in initializer.external_data}
        key = (kind, *dims, *sorted(place.items()))
        if (tensor := self._known.get(key)) is None:
            dtype = TORCH_TYPES.get(kind, torch.uint8)
            tensor = self._mapped(initializer.name, place, dims, dtype, graph).to(self._device)
            self._known[key] = tensor
        return tensor

    def _mapped(self, name: str, place: dict[str, str], dims: list[int], dtype: torch.dtype, graph: Path) -> Tensor:
        """A memory map of the file, which nothing writes to."""
        location, offset, length = place["location"], int(place.get("offset", 0)), int(place.get("length", -1))
        file, needed = self._directory / location, prod(dims) * dtype.itemsize
        there = file.stat().st_size if is_file_name(location) and file.is_file() else 0
        if length != needed or not 0 <= offset <= there - needed:
            raise EngineError(
                f"{graph}: {shown(name)}: expected {needed} bytes, found {length} at {offset} of the {there} bytes"
                f" of {shown(location)}",
                hint="build the engine again",
            )
        if needed == 0:
            return torch.empty(dims, dtype=dtype)
        data = np.memmap(file, np.uint8, mode="c", offset=offset, shape=(needed,))
        return torch.from_numpy(data).view(dtype).view(dims)


def _inline(initializer: TensorProto) -> Tensor:
    """A small constant in the graph itself."""
    array = numpy_helper.to_array(initializer)
    if initializer.data_type in PACKED_TYPES:
        codes = array.view(np.uint8) & 15
        return torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=TORCH_TYPES[initializer.data_type]).view(array.shape)
