# SPDX-License-Identifier: Apache-2.0
"""The drafter on ONNX Runtime: the engine directory's own graphs, lowered to FLOAT and standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.manifest import Manifest
from dflash_trt.graph.ort_session import graph_session

INITIAL_ROWS = 512
NUMPY_TYPES = {torch.float32: np.float32, torch.int32: np.int32}


class OnnxDrafter:
    """Holds the context cache [slots, L, C, G, D] FLOAT, whose C grows, and runs both graphs in FLOAT."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        num_slots: int = 1,
        device: str = "cpu",
        expose: Sequence[str] = (),
    ) -> None:
        """Creates both sessions; `manifest` is that of `directory`, read and checked by `read_manifest`.

        `device` is "cpu" or "cuda"; `expose` names values inside draft.onnx that `draft_values` may return.

        Raises MissingDependencyError when ONNX Runtime has no provider for the device, EngineError when it refuses a
        graph.
        """
        self.spec: DraftSpec = manifest.draft
        self.cache_bytes_per_token = 2 * self.spec.context_bytes_per_token(fp8=False)  # FLOAT, not BF16
        self._device = torch.device(device)
        self._context = graph_session(directory, manifest.graphs["context"].file, device=device)
        self._draft = graph_session(directory, manifest.graphs["draft"].file, expose, device=device)
        layers, heads, head_dim = len(self.spec.layers), self.spec.num_key_value_heads, self.spec.head_dim
        self._k_cache = torch.zeros(num_slots, layers, INITIAL_ROWS, heads, head_dim, device=device)
        self._v_cache = torch.zeros_like(self._k_cache)
        self._lengths = [0] * num_slots

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: Tensor) -> None:
        """Appends context rows made from taps [T, A*H], num_rows[i] of them to slots[i]."""
        rows: list[int] = []  # the slot of each row
        positions: list[int] = []
        for slot, count in zip(slots, num_rows, strict=True):
            rows += [slot] * count
            positions += range(self._lengths[slot], self._lengths[slot] + count)
            self._lengths[slot] += count
        self._reserve(max(positions, default=0) + 1)
        row_index, position_index = self._integers(rows, torch.int64), self._integers(positions, torch.int64)
        shape = (len(rows), *self._k_cache.shape[1:2], *self._k_cache.shape[3:])  # [T, L, G, D]
        inputs = {"target_hidden": taps.float(), "positions": position_index.int()}
        k, v = self._run(self._context, inputs, {"k": shape, "v": shape})
        self._k_cache[row_index, :, position_index] = k
        self._v_cache[row_index, :, position_index] = v

    def draft(self, slots: Sequence[int], noise_embeds: Tensor) -> Tensor:
        """hidden [B, S, H] of blocks with embeddings noise_embeds [B, S, H], each right after its slot's context."""
        return self.draft_values(slots, noise_embeds, ["hidden"])[0]

    def draft_values(self, slots: Sequence[int], noise_embeds: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The named values of one pass over the blocks as `draft` makes it, each [B, S, H]."""
        lengths = self._integers([self._lengths[slot] for slot in slots], torch.int32)
        block = torch.arange(noise_embeds.shape[1], dtype=torch.int32, device=self._device)
        inputs = {
            "noise_embeds": noise_embeds.float(),
            "positions": lengths[:, None] + block,
            "k_cache": self._k_cache,
            "v_cache": self._v_cache,
            "slot_ids": self._integers(slots, torch.int32),
            "context_lengths": lengths,
        }
        return self._run(self._draft, inputs, dict.fromkeys(names, tuple(noise_embeds.shape)))

    def context(self, slot: int) -> tuple[Tensor, Tensor]:
        """Views of the slot's injected k and v, each [L, C, G, D]."""
        length = self._lengths[slot]
        return self._k_cache[slot, :, :length], self._v_cache[slot, :, :length]

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
        self._lengths[slot] = 0

    def _reserve(self, num_rows: int) -> None:
        capacity = self._k_cache.shape[2]
        if num_rows > capacity:
            missing = max(num_rows, 2 * capacity) - capacity
            self._k_cache, self._v_cache = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (self._k_cache, self._v_cache))

    def _integers(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, tuple[int, ...]],
    ) -> list[Tensor]:
        """Runs a graph on torch's own memory; `outputs` are the names and shapes of FLOAT values to return."""
        binding = session.io_binding()
        device, index = self._device.type, self._device.index or 0
        kept = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in kept.items():
            binding.bind_input(name, device, index, NUMPY_TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
        results = []
        for name, shape in outputs.items():
            result = torch.empty(shape, device=self._device)
            binding.bind_output(name, device, index, np.float32, result.shape, result.data_ptr())
            results.append(result)
        if device == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # ONNX Runtime computes on a stream of its own
        session.run_with_iobinding(binding)
        return results
