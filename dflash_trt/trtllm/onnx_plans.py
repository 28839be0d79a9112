# SPDX-License-Identifier: Apache-2.0
"""The graphs on ONNX Runtime's CPU provider: how the drafter module is checked without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import Tensor

from dflash_trt.engine.manifest import Manifest
from dflash_trt.graph.ort_session import graph_session


class OnnxPlans:
    """FLOAT throughout, as the CPU lowering of the graphs has it."""

    cache_dtype = torch.float32

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._caches: dict[str, npt.NDArray[np.float32]] = {}

    def load(self) -> None:
        """Creates both sessions."""
        if not self._sessions:
            graphs = self._manifest.graphs.items()
            self._sessions = {name: graph_session(self._directory, graph.file) for name, graph in graphs}

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Views of the worker's caches: what it writes is seen."""
        self._caches = {"k_cache": k_cache.numpy(), "v_cache": v_cache.numpy()}

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D]."""
        feed = {"target_hidden": taps.float().numpy(), "positions": positions.int().numpy()}
        k, v = self._sessions["context"].run(["k", "v"], feed)
        return torch.from_numpy(k), torch.from_numpy(v)

    def draft(self, noise_embeds: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """hidden [B, S, H]."""
        feed = {
            "noise_embeds": noise_embeds.float().numpy(),
            "positions": positions.int().numpy(),
            "slot_ids": slots.int().numpy(),
            "context_lengths": lengths.int().numpy(),
        }
        (hidden,) = self._sessions["draft"].run(["hidden"], feed | self._caches)
        return torch.from_numpy(hidden)
