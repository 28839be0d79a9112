# SPDX-License-Identifier: Apache-2.0
"""A session whose inputs and outputs lie in torch's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

NUMPY_TYPES = {torch.float32: np.float32, torch.int32: np.int32}
TOKEN_IDS = ("token_ids", "candidate_ids")
"""Outputs in INT32; all others are FLOAT."""
MAX_SIZES = 512
"""Combinations of row and page counts that stay bound."""


class _Bound(NamedTuple):
    """The binding of a graph for one size."""

    binding: onnxruntime.IOBinding
    inputs: list[Tensor]
    outputs: list[Tensor]


class BoundGraph:
    """Binds each size once, as binding costs more than copying a step's inputs; all sizes share the memory."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.forget()

    def forget(self) -> None:
        """Releases all memory."""
        self._shared: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self._bound: dict[tuple[object, ...], _Bound] = {}

    def share(self, **tensors: Tensor) -> None:
        """Reads these inputs in place from now on."""
        self._shared |= tensors
        self._bound.clear()

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Runs the graph; `outputs` are the names and shapes of values to return: FLOAT ones, and token ids.

        The next call overwrites them.
        """
        size = (*outputs, *(tensor.shape for tensor in inputs.values()))
        bound = self._bound.get(size) or self._bind(size, inputs, outputs)
        for own, tensor in zip(bound.inputs, inputs.values(), strict=True):
            own.copy_(tensor)
        self._session.run_with_iobinding(bound.binding)
        return bound.outputs

    def _bind(
        self, size: tuple[object, ...], inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]
    ) -> _Bound:
        ours = [
            self._memory(name, tensor.shape, torch.float32 if tensor.is_floating_point() else torch.int32)
            for name, tensor in inputs.items()
        ]
        results = [
            self._memory(name, shape, torch.int32 if name in TOKEN_IDS else torch.float32)
            for name, shape in outputs.items()
        ]
        binding = self._session.io_binding()
        for name, tensor in (*zip(inputs, ours, strict=True), *self._shared.items()):
            binding.bind_input(name, *_place(tensor))
        for name, tensor in zip(outputs, results, strict=True):
            binding.bind_output(name, *_place(tensor))
        if len(self._bound) == MAX_SIZES:
            self._bound.clear()
        self._bound[size] = _Bound(binding, ours, results)
        return self._bound[size]

    @torch.inference_mode(False)  # memory that is written in that mode and outside it
    def _memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The beginning of a value's memory, which all of its sizes share."""
        count = math.prod(shape)
        if name not in self._own or len(self._own[name]) < count:
            self._own[name] = torch.empty(count, dtype=dtype)
            self._bound.clear()
        return self._own[name][:count].view(*shape)


def _place(tensor: Tensor) -> tuple[str, int, type[np.generic], tuple[int, ...], int]:
    return "cpu", 0, NUMPY_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
