# SPDX-License-Identifier: Apache-2.0
"""The graphs on ONNX Runtime, lowered to FLOAT, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from dflash_trt.engine.executor import CorrelatorInputs, DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.signatures import CORRELATOR
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session

NUMPY_TYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
TOKEN_IDS = {"token_ids": torch.int32, "candidate_ids": torch.int64}
"""Outputs of integers; all others are FLOAT."""
MAX_SIZES = 512
"""Combinations of row and page counts that stay bound."""


class OnnxExecutor:
    """An Executor that computes in FLOAT, on torch's own memory."""

    cache_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, directory: Path, manifest: Manifest, *, expose: Sequence[str] = ()) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        `expose` names values [B*S, H] inside draft.onnx that `draft` returns, too.
        """
        self._directory = directory
        self._manifest = manifest
        self._expose = expose
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._bound: dict[str, BoundGraph] = {}

    def cache_rows(self, num_slots: int) -> None:
        """None: graphs on ONNX Runtime have no such limit."""

    def load(self) -> None:
        """Creates the sessions.

        Raises EngineError when ONNX Runtime refuses a graph.
        """
        for name, graph in self._manifest.graphs.items():
            if name not in self._sessions:
                expose = self._expose if name == "draft" else ()
                self._sessions[name] = graph_session(self._directory, graph.file, expose)
                self._bound[name] = BoundGraph(self._sessions[name])

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Reads the caches in place, so later writes of their owner are seen."""
        self._bound["draft"].share(k_cache=k_cache, v_cache=v_cache)

    def bind_pool(self, layers: Sequence[Tensor], max_pages: int) -> None:
        """Raises EngineError: standard operators follow no pointers."""
        raise EngineError(
            "the ONNX Runtime executor cannot use a pool of pages",
            hint="build plans: dflash-trt build --plans-for DIR",
        )

    def release(self) -> None:
        """Drops the caches."""
        for graph in self._bound.values():
            graph.forget()

    def close(self) -> None:
        """Drops the caches and the sessions."""
        self._bound.clear()
        self._sessions.clear()

    def context(self, taps: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """The context graph's outputs in FLOAT."""
        shapes = {port.name: port.sizes({"T": len(taps)}) for port in self._manifest.graphs["context"].outputs}
        inputs = {"target_hidden": taps, "positions": positions}
        return dict(zip(shapes, self._bound["context"].run(inputs, shapes), strict=True))

    def draft(self, inputs: DraftInputs) -> dict[str, Tensor]:
        """The draft graph's outputs in FLOAT, token ids in integers."""
        B, S, H = inputs.noise_embeds.shape
        shapes = {port.name: port.sizes({"B": B}) for port in self._manifest.graphs["draft"].outputs}
        shapes |= {name: [B * S, H] for name in self._expose}
        values = dict(zip(shapes, self._bound["draft"].run(inputs._asdict(), shapes), strict=True))
        return values | {name: values[name].view(B, S, H) for name in self._expose}

    def correlate(self, inputs: CorrelatorInputs) -> Tensor:
        """The correlator's scores."""
        B, count = inputs.slot_hidden.shape[:2]
        (scores,) = self._manifest.graphs[CORRELATOR].outputs
        shape = scores.sizes({"B": B})
        (values,) = self._bound[CORRELATOR].run(inputs.padded(shape[1]), {scores.name: shape})
        return values[:, :count]


class _Bound(NamedTuple):
    """The binding of a graph for one size."""

    binding: onnxruntime.IOBinding
    inputs: list[Tensor]
    outputs: list[Tensor]


class BoundGraph:
    """A session whose inputs and outputs are in torch's memory, bound once for each size.

    Binding costs more than copying a step's inputs; all sizes share the memory.
    """

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
        results = [self._memory(name, shape, TOKEN_IDS.get(name, torch.float32)) for name, shape in outputs.items()]
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
