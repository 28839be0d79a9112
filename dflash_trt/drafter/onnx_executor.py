# SPDX-License-Identifier: Apache-2.0
"""The two graphs on ONNX Runtime, lowered to FLOAT and standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._caches: dict[str, Tensor] = {}

    def cache_rows(self, num_slots: int) -> None:
        """No bound: C is a dynamic axis."""

    def load(self) -> None:
        """Creates both sessions.

        Raises MissingDependencyError when ONNX Runtime has no provider for the device, EngineError when it refuses a
        graph.
        """
        for name, graph in self._manifest.graphs.items():
            if name not in self._sessions:
                expose = self._expose if name == "draft" else ()
                self._sessions[name] = graph_session(self._directory, graph.file, expose, device=str(self.device))

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Keeps the caches: what their owner writes into them is seen."""
        self._caches = {"k_cache": k_cache, "v_cache": v_cache}

    def release(self) -> None:
        """Drops the caches."""
        self._caches = {}

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] FLOAT."""
        inputs = {"target_hidden": taps.float(), "positions": positions.int()}
        outputs = {port.name: port.sizes({"T": len(taps)}) for port in self._manifest.graphs["context"].outputs}
        k, v = self._run("context", inputs, outputs)
        return k, v

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H]."""
        return self.draft_values(inputs, ["hidden"])[0].to(inputs.noise_embeds.dtype)

    def draft_values(self, inputs: DraftInputs, names: Sequence[str]) -> list[Tensor]:
        """The named values of one pass as `draft` makes it, each [B, S, H] FLOAT."""
        B, S, H = inputs.noise_embeds.shape
        shapes = {name: (B, S, H) if name == "hidden" else (B * S, H) for name in names}
        return [value.view(B, S, H) for value in self._run("draft", self._feed(inputs), shapes)]

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Proposals [B, S-1]."""
        B, S, _ = inputs.noise_embeds.shape
        return self._run("draft", self._feed(inputs), {PROPOSALS: (B, S - 1)})[0].long()

    def _feed(self, inputs: DraftInputs) -> dict[str, Tensor]:
        return {
            "noise_embeds": inputs.noise_embeds.float(),
            "positions": inputs.positions.int(),
            "slot_ids": inputs.slot_ids.int(),
            "context_lengths": inputs.context_lengths.int(),
            **self._caches,
        }

    def _run(self, graph: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Runs a graph; `outputs` are the names and shapes of values to return: FLOAT ones, and token ids."""
        session = self._sessions[graph]
        binding = session.io_binding()
        device, index = self.device.type, self.device.index or 0
        contiguous = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in contiguous.items():
            binding.bind_input(name, device, index, NUMPY_TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
        results = []
        for name, shape in outputs.items():
            dtype = torch.int32 if name == PROPOSALS else torch.float32
            result = torch.empty(shape, dtype=dtype, device=self.device)
            binding.bind_output(name, device, index, NUMPY_TYPES[dtype], result.shape, result.data_ptr())
            results.append(result)
        if device == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # ONNX Runtime computes on a stream of its own
        session.run_with_iobinding(binding)
        return results
