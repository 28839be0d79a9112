# SPDX-License-Identifier: Apache-2.0
"""The graphs as TensorRT plans on the stream, and inside the CUDA graphs, of TensorRT-LLM's executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.drafter.launcher import Launcher
from dflash_trt.drafter.plan_runner import PlanRunner
from dflash_trt.drafter.tensorrt_drafter import load_plan, make_runtime, tensorrt_for
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import EngineError


class CurrentStreamLauncher:
    """Queues on torch's current stream; the executor captures its own CUDA graphs around what is queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def handle(self) -> int:
        """cudaStream_t of the stream that is current now."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def queued(self) -> AbstractContextManager[None]:
        """Nothing to order: it is the caller's stream."""
        return nullcontext()

    def upload(self, values: Sequence[int], into: Tensor) -> None:
        """Through pinned memory; the host does not wait."""
        into.copy_(torch.tensor(values, dtype=into.dtype).pin_memory(), non_blocking=True)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` itself, after a first run that lets TensorRT and the plugin set themselves up outside any capture."""
        work()
        return work


class TensorRTPlans:
    """One execution context for each size; smaller calls are padded, larger ones are queued in parts."""

    cache_dtype = torch.bfloat16

    def __init__(self, directory: Path, manifest: Manifest, launcher: Launcher | None = None) -> None:
        """Raises EngineError for plans whose cache has a dtype of its own: the worker casts taps to the cache's."""
        if manifest.quantization.fp8_kv_cache:
            raise EngineError(
                f"{directory}: expected plans with a BF16 context cache for engine mode, found FP8",
                hint="build with the recipe without +fp8-kv",
            )
        self._directory = directory
        self._manifest = manifest
        self._trt: Any = None
        self._runtime: Any = None
        self._launcher = launcher

    def load(self) -> None:
        """Reads the context plan. Raises MissingDependencyError and EngineError as `tensorrt_for` does."""
        if self._runtime is not None:
            return
        if self._launcher is None:
            self._launcher = CurrentStreamLauncher(torch.device("cuda", torch.cuda.current_device()))
        self._trt = tensorrt_for(self._directory, self._manifest, 1, self._launcher.device.index or 0)
        self._runtime = make_runtime(self._trt, self._manifest)
        self._context, self._rows = self._open("context", "T", {})

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Reads the draft plan for these caches. Raises EngineError where they are larger than it was built for."""
        self._check_size(k_cache.shape[0], k_cache.shape[2])
        self._draft, self._blocks = self._open("draft", "B", {"k_cache": k_cache, "v_cache": v_cache})

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D]."""
        parts = [
            self._context_part(taps[begin : begin + self._context.sizes[-1]], positions[begin:])
            for begin in range(0, len(taps), self._context.sizes[-1])
        ]
        return parts[0] if len(parts) == 1 else (torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]))

    def draft(self, noise_embeds: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """hidden [B, S, H]."""
        inputs = {"noise_embeds": noise_embeds, "positions": positions, "slot_ids": slots, "context_lengths": lengths}
        most = self._draft.sizes[-1]
        parts = [
            self._draft_part({name: value[begin : begin + most] for name, value in inputs.items()})
            for begin in range(0, len(slots), most)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _context_part(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        T, rows = len(taps), self._rows
        rows["target_hidden"][:T].copy_(taps)
        rows["positions"][:T].copy_(positions[:T])
        self._context.run(T)
        return rows["k"][:T].clone(), rows["v"][:T].clone()

    def _draft_part(self, inputs: dict[str, Tensor]) -> Tensor:
        B = len(inputs["slot_ids"])
        for name, value in inputs.items():
            self._blocks[name][:B].copy_(value)
        padding = slice(B, B + self._draft.padding(B))
        for name in ("slot_ids", "context_lengths"):  # rows without context cost no reading of the cache
            self._blocks[name][padding].zero_()
        self._draft.run(B)
        return self._blocks["hidden"][:B].clone()

    def _open(self, name: str, axis: str, cached: dict[str, Tensor]) -> tuple[PlanRunner, dict[str, Tensor]]:
        assert self._launcher is not None
        return load_plan(self._trt, self._runtime, self._directory, self._manifest, name, axis, cached, self._launcher)

    def _check_size(self, slots: int, rows: int) -> None:
        profile = self._manifest.plans["draft"].profiles[0]
        if slots > profile["slots"].max or rows > profile["C_max"].max:
            raise EngineError(
                f"{self._directory}: expected a context cache of at most {profile['slots'].max} slots of"
                f" {profile['C_max'].max} rows, for which the plan was built, found {slots} of {rows}",
                hint=f"dflash-trt build {self._directory} --backend tensorrt --max-batch-size {slots}"
                f" --max-seq-len {rows}",
            )
