# SPDX-License-Identifier: Apache-2.0
"""The drafter on TensorRT: one CUDA graph for each batch size, everything bound once. Not yet run with libnvinfer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.drafter.context_cache import ContextCache
from dflash_trt.drafter.launcher import CudaLauncher, Launcher
from dflash_trt.drafter.plan_runner import PlanRunner
from dflash_trt.engine import machine, tensorrt_api
from dflash_trt.engine.manifest import Manifest, sha256
from dflash_trt.engine.plan import GRAPHS, check_plan
from dflash_trt.engine.plugin_library import plugin_library
from dflash_trt.errors import EngineError

DTYPES = {"BFLOAT16": torch.bfloat16, "FLOAT8E4M3FN": torch.float8_e4m3fn, "INT32": torch.int32}


class TensorRTDrafter:
    """Runs both plans of an engine directory on one GPU; no call waits for the GPU."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        num_slots: int = 1,
        device: str = "cuda",
        launcher: Launcher | None = None,
    ) -> None:
        """Loads, binds and captures; `manifest` is that of `directory`, read and checked by `read_manifest`.

        `device` is torch's current GPU: TensorRT loads a plan onto that one. Raises MissingDependencyError without GPU,
        TensorRT or plugin, EngineError when the plans were built for another machine or for fewer slots.
        """
        self.spec: DraftSpec = manifest.draft
        fp8 = manifest.quantization.fp8_kv_cache
        self.cache_bytes_per_token = self.spec.context_bytes_per_token(fp8=fp8)
        trt = tensorrt_for(directory, manifest, num_slots, torch.device(device).index or 0)
        launcher = launcher or CudaLauncher(torch.device(device))
        self._launcher = launcher
        runtime = make_runtime(trt, manifest)
        rows = manifest.plans["draft"].profiles[0]["C_max"].max
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self._cache = ContextCache(self.spec, num_slots, rows, dtype, launcher.device)
        cached = {"k_cache": self._cache.k, "v_cache": self._cache.v}
        self._context, self._rows = load_plan(trt, runtime, directory, manifest, "context", "T", {}, launcher)
        self._draft, self._block = load_plan(trt, runtime, directory, manifest, "draft", "B", cached, launcher)
        most = self._context.sizes[-1]
        self._row_slots = torch.zeros(most, dtype=torch.int64, device=launcher.device)
        self._row_positions = torch.zeros_like(self._row_slots)
        self._offsets = torch.arange(self.spec.block_size, dtype=torch.int32, device=launcher.device)

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: Tensor) -> None:
        """Appends context rows made from taps [T, A*H], num_rows[i] of them to slots[i]."""
        row_slots, positions = self._cache.reserve(slots, num_rows)
        most = self._context.sizes[-1]
        with self._launcher.queued():
            for begin in range(0, len(positions), most):
                part = slice(begin, begin + most)
                self._inject_part(row_slots[part], positions[part], taps[part])

    def draft(self, slots: Sequence[int], noise_embeds: Tensor) -> Tensor:
        """hidden [B, S, H] of blocks with embeddings noise_embeds [B, S, H], in their dtype."""
        most = self._draft.sizes[-1]
        with self._launcher.queued():
            parts = [
                self._draft_part(slots[begin : begin + most], noise_embeds[begin : begin + most])
                for begin in range(0, len(slots), most)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
        self._cache.lengths[slot] = 0

    def _inject_part(self, slots: Sequence[int], positions: Sequence[int], taps: Tensor) -> None:
        T = len(positions)
        self._launcher.upload(slots, self._row_slots[:T])
        self._launcher.upload(positions, self._row_positions[:T])
        self._rows["target_hidden"][:T].copy_(taps)
        self._rows["positions"][:T].copy_(self._row_positions[:T])
        self._context.run(T)
        self._cache.write(self._row_slots[:T], self._row_positions[:T], self._rows["k"][:T], self._rows["v"][:T])

    def _draft_part(self, slots: Sequence[int], noise_embeds: Tensor) -> Tensor:
        B = len(slots)
        block = self._block
        padding = [0] * self._draft.padding(B)  # rows without context cost no reading of the cache
        lengths = [self._cache.lengths[slot] for slot in slots]
        block["noise_embeds"][:B].copy_(noise_embeds)
        self._launcher.upload([*slots, *padding], block["slot_ids"][: B + len(padding)])
        self._launcher.upload([*lengths, *padding], block["context_lengths"][: B + len(padding)])
        torch.add(block["context_lengths"][:B, None], self._offsets, out=block["positions"][:B])
        self._draft.run(B)
        return block["hidden"][:B].to(noise_embeds.dtype, copy=True)


def tensorrt_for(directory: Path, manifest: Manifest, num_slots: int, gpu_index: int) -> Any:
    """The module, with the plugin registered where a plan needs it, once both plans are known to fit this machine."""
    for name in GRAPHS:
        if name not in manifest.plans:
            raise EngineError(
                f"{directory}: expected {name}.plan, found an engine for ONNX Runtime only",
                hint=f"on the GPU machine: dflash-trt build {directory} --backend tensorrt",
            )
    if num_slots > (most := manifest.plans["draft"].profiles[0]["slots"].max):
        raise EngineError(
            f"{directory}: expected at most {most} slots, for which the plan was built, found {num_slots}",
            hint=f"dflash-trt build {directory} --backend tensorrt --max-batch-size {num_slots}",
        )
    trt, gpu = tensorrt_api.load_tensorrt(), machine.gpu(gpu_index)
    library = plugin_library() if any(plan.needs_plugin for plan in manifest.plans.values()) else None
    found = None if library is None else sha256(library)
    for plan in manifest.plans.values():
        check_plan(plan, directory, manifest.sha256, gpu, str(trt.__version__), found)
    if library is not None:
        plugin = manifest.plugin
        tensorrt_api.load_plugin(trt, library, plugin.name, plugin.version, plugin.namespace)
    return trt


def make_runtime(trt: Any, manifest: Manifest) -> Any:
    """TensorRT's runtime, which loads the plans of `manifest`."""
    runtime = trt.Runtime(tensorrt_api.make_logger(trt))
    if any(plan.version_compatible for plan in manifest.plans.values()):
        runtime.engine_host_code_allowed = True  # the plan carries the plugin's code; its sha256 is checked
    return runtime


def load_plan(
    trt: Any,
    runtime: Any,
    directory: Path,
    manifest: Manifest,
    name: str,
    axis: str,
    cached: dict[str, Tensor],
    launcher: Launcher,
) -> tuple[PlanRunner, dict[str, Tensor]]:
    """A plan and its inputs and outputs, allocated for its largest profile; those in `cached` are there already."""
    graph, plan = manifest.graphs[name], manifest.plans[name]
    largest = plan.profiles[-1]
    tensors = dict(cached)
    for port in (*graph.inputs, *graph.outputs):
        if port.name not in cached:
            shape = [largest[size].max if isinstance(size, str) else size for size in port.shape]
            tensors[port.name] = torch.zeros(shape, dtype=DTYPES[port.dtype], device=launcher.device)
    runner = PlanRunner(
        trt,
        runtime,
        directory / plan.file,
        plan,
        axis=axis,
        tensors=tensors,
        cached=frozenset(cached),
        launcher=launcher,
    )
    return runner, tensors
