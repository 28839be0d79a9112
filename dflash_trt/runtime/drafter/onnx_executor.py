# SPDX-License-Identifier: Apache-2.0
"""The two graphs on ONNX Runtime, lowered to FLOAT, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.onnxruntime.bound_graph import BoundGraph
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session


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
        """Creates both sessions.

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
            "ONNX Runtime: expected a context cache of its own, found a pool of pages",
            hint="build plans: dflash-trt build --plans-for DIR",
        )

    def release(self) -> None:
        """Drops the caches."""
        for graph in self._bound.values():
            graph.forget()

    def close(self) -> None:
        """Drops the caches and both sessions."""
        self._bound.clear()
        self._sessions.clear()

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """kv [T, 2, L, G, D] FLOAT."""
        (port,) = self._manifest.graphs["context"].outputs
        inputs = {"target_hidden": taps, "positions": positions}
        return self._bound["context"].run(inputs, {port.name: port.sizes({"T": len(taps)})})[0]

    def draft(self, inputs: DraftInputs) -> dict[str, Tensor]:
        """The draft graph's outputs in FLOAT and INT32."""
        B, S, H = inputs.noise_embeds.shape
        shapes = {port.name: port.sizes({"B": B}) for port in self._manifest.graphs["draft"].outputs}
        shapes |= {name: [B * S, H] for name in self._expose}
        values = dict(zip(shapes, self._bound["draft"].run(inputs._asdict(), shapes), strict=True))
        return values | {name: values[name].view(B, S, H) for name in self._expose}
