# SPDX-License-Identifier: Apache-2.0
"""The two graphs on ONNX Runtime, lowered to FLOAT and standard operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from dflash_trt.drafter.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.graph.ort_session import graph_session

NUMPY_TYPES = {torch.float32: np.float32, torch.int32: np.int32}
PROPOSALS = "token_ids"
Place = tuple[int, tuple[int, ...]]
"""Address and shape."""


class OnnxExecutor:
    """An Executor that computes in FLOAT, on torch's own memory."""

    cache_dtype = torch.float32

    def __init__(self, directory: Path, manifest: Manifest, *, device: str = "cpu", expose: Sequence[str] = ()) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        `device` is cpu, cuda or cuda:N; `expose` names values inside draft.onnx that `draft_values` may return.
        """
        self.device = torch.device(device)
        self._directory = directory
        self._manifest = manifest
        self._expose = expose
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._bound: dict[str, BoundGraph] = {}
        self._caches: dict[str, Tensor] = {}

    def cache_rows(self, num_slots: int) -> None:
        """None: slots consist of pages."""

    def load(self) -> None:
        """Creates both sessions.

        Raises MissingDependencyError when ONNX Runtime has no provider for the device, EngineError when it refuses a
        graph.
        """
        for name, graph in self._manifest.graphs.items():
            if name not in self._sessions:
                expose = self._expose if name == "draft" else ()
                self._sessions[name] = graph_session(self._directory, graph.file, expose, device=str(self.device))
                self._bound[name] = BoundGraph(self._sessions[name], self.device)

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Keeps the caches: what their owner writes into them is seen."""
        self._caches = {"k_cache": k_cache, "v_cache": v_cache}

    def release(self) -> None:
        """Drops the caches."""
        self._caches = {}
        for graph in self._bound.values():
            graph.forget()

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] FLOAT."""
        inputs = {"target_hidden": taps.float(), "positions": positions.int()}
        outputs = {port.name: port.sizes({"T": len(taps)}) for port in self._manifest.graphs["context"].outputs}
        k, v = self._bound["context"].run(inputs, outputs)
        return k, v

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H]."""
        return self.draft_values(inputs, ["hidden"])[0].to(inputs.noise_embeds.dtype)

    def draft_values(self, inputs: DraftInputs, names: Sequence[str]) -> list[Tensor]:
        """The named values of one pass as `draft` makes it, each [B, S, H] FLOAT."""
        B, S, H = inputs.noise_embeds.shape
        shapes = {name: (B, S, H) if name == "hidden" else (B * S, H) for name in names}
        return [value.view(B, S, H) for value in self._bound["draft"].run(self._feed(inputs), shapes)]

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Proposals [B, S-1]."""
        B, S, _ = inputs.noise_embeds.shape
        return self._bound["draft"].run(self._feed(inputs), {PROPOSALS: (B, S - 1)})[0].long()

    def _feed(self, inputs: DraftInputs) -> dict[str, Tensor]:
        return {
            "noise_embeds": inputs.noise_embeds.float(),
            "positions": inputs.positions.int(),
            "slot_ids": inputs.slot_ids.int(),
            "context_lengths": inputs.context_lengths.int(),
            **self._caches,
        }


class BoundGraph:
    """A session whose inputs and outputs lie in torch's memory; what stays in its place is bound once."""

    def __init__(self, session: onnxruntime.InferenceSession, device: torch.device) -> None:
        self._session = session
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Lets go of all memory that it was given."""
        self._binding = self._session.io_binding()
        self._inputs: dict[str, Place] = {}
        self._outputs: tuple[str, ...] = ()

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Runs the graph; `outputs` are the names and shapes of values to return: FLOAT ones, and token ids."""
        kept = [tensor.contiguous() for tensor in inputs.values()]  # until it has run
        for name, tensor in zip(inputs, kept, strict=True):
            place = tensor.data_ptr(), tuple(tensor.shape)
            if self._inputs.get(name) != place:
                self._bind(self._binding.bind_input, name, tensor.dtype, place)
                self._inputs[name] = place
        if self._outputs != (names := tuple(outputs)):
            self._binding.clear_binding_outputs()
            self._outputs = names
        results = []
        for name, shape in outputs.items():
            result = torch.empty(shape, dtype=torch.int32 if name == PROPOSALS else torch.float32, device=self._device)
            self._bind(self._binding.bind_output, name, result.dtype, (result.data_ptr(), tuple(shape)))
            results.append(result)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # ONNX Runtime computes on a stream of its own
        self._session.run_with_iobinding(self._binding)
        return results

    def _bind(self, bind: Callable[..., None], name: str, dtype: torch.dtype, place: Place) -> None:
        address, shape = place
        bind(name, self._device.type, self._device.index or 0, NUMPY_TYPES[dtype], shape, address)
