# SPDX-License-Identifier: Apache-2.0
"""The graphs in torch: the default on a GPU without TensorRT plans, and with --executor torch on a CPU.

On a GPU each size is a CUDA graph. Not faster than ONNX Runtime on a CPU, where it shows what a GPU computes: BF16, and
FP8 products.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.api.runtime_options import DEFAULT_BATCH_SIZE
from dflash_trt.device.attention_kernel import check_kernels
from dflash_trt.device.fused import why_not_compiled
from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.machine import LOWEST_SM
from dflash_trt.engine.plans.plan import graph_batch_sizes, row_buckets
from dflash_trt.engine.recorded_executor import RecordedExecutor
from dflash_trt.engine.recorded_graph import RecordedGraph, graph_tensors
from dflash_trt.engine.signatures import CORRELATOR, MAX_CONTEXT, num_pages_for
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.torch.calls import WITH_FP8_CODES
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch.onnx_graph import OnnxGraph
from dflash_trt.runtime.drafter.torch.scaled_linear import patterns
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights

LOG = logging.getLogger("dflash_trt.runtime")
MAX_ROWS = 256
"""T of the largest call; more context rows go in parts."""


class TorchExecutor(RecordedExecutor):
    """An Executor on one GPU, or a CPU."""

    def __init__(self, directory: Path, manifest: Manifest, launcher: Launcher, *, expose: Sequence[str] = ()) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        `expose` names values [B*S, H] inside draft.onnx that `draft` returns, too.
        """
        super().__init__(manifest, launcher)
        self._directory = directory
        self._expose = expose
        self._num_slots = DEFAULT_BATCH_SIZE
        self._warned: set[str] = set()
        self._weights = StoredWeights(directory, launcher.device)

    def cache_rows(self, num_slots: int) -> None:
        """None: the cache grows. Blocks of a pass are at most `num_slots`; more go in parts."""
        self._num_slots = num_slots

    def load(self) -> None:
        """Reads the graphs that read no context.

        Raises EngineError for an operator without a function here, or an FP8 cache on a GPU without FP8,
        MissingDependencyError on a GPU that the attention kernel was not compiled for.
        """
        if self.device.type == "cuda":
            check_kernels(self.device)
            self._check_cache()
        super().load()

    def _check_cache(self) -> None:
        found = torch.cuda.get_device_capability(self.device)
        if self.cache_dtype == torch.float8_e4m3fn and found < LOWEST_SM["FP8"]:
            raise EngineError(
                f"{self._directory}: expected a GPU of compute capability 8.9 or newer for an FP8 context cache, found"
                f" {found[0]}.{found[1]}",
                hint="build the engine again with a recipe without +fp8-kv",
            )

    def _max_blocks(self) -> int:
        return self._num_slots

    def _max_pages(self) -> int:
        spec = self._manifest.draft
        return num_pages_for(min(spec.max_position_embeddings, MAX_CONTEXT))

    def _load_context(self) -> RecordedGraph:
        return self._load("context", {"T": MAX_ROWS}, {}, row_buckets(MAX_ROWS))

    def _load_correlator(self) -> RecordedGraph:
        return self._load(CORRELATOR, {"B": self._num_slots}, {}, graph_batch_sizes(self._num_slots))

    def _load_draft(self, cached: Mapping[str, Tensor]) -> RecordedGraph:
        spec, B = self._manifest.draft, self._num_slots
        shape = (B, spec.block_size, spec.hidden_size)
        exposed = {name: torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for name in self._expose}
        return self._load("draft", {"B": B}, {**cached, **exposed}, graph_batch_sizes(B))

    def _load(
        self, name: str, axes: Mapping[str, int], there: Mapping[str, Tensor], sizes: Sequence[int]
    ) -> RecordedGraph:
        """The graph `name` on its own tensors and those `there`; what reads the context has no leading axis."""
        graph = self._manifest.graphs[name]
        exposed = [value for value in self._expose if value in there]
        tensors = {**graph_tensors(graph, axes, there, self.device), **{value: there[value] for value in exposed}}
        outputs = [*(port.name for port in graph.outputs), *exposed]
        onnx_graph = OnnxGraph(self._directory, graph.file, self._weights)
        program = Program(onnx_graph, outputs, patterns(self.device))
        if program.has_dequantised:
            self._warn("no product of these quantised weights here: they are dequantised into BF16")
        if self.device.type == "cuda":
            self._fuse(program)
        inputs = {port.name: not set(axes).isdisjoint(map(str, port.shape)) for port in graph.inputs}

        def record(rows: int) -> Callable[[], None]:
            given = {name: tensors[name][:rows] if is_sized else tensors[name] for name, is_sized in inputs.items()}

            @torch.no_grad()
            def work() -> None:
                for name, value in program.run(given).items():
                    tensors[name][:rows].copy_(value.view_as(tensors[name][:rows]))

            return self._launcher.record(work)

        began = time.perf_counter()
        recorded = RecordedGraph(tensors, outputs, sizes, record)
        LOG.info("%s: %s ready for %s rows in %.1f s", self._directory, graph.file, sizes, time.perf_counter() - began)
        return recorded

    def _fuse(self, program: Program) -> None:
        if lacking := why_not_compiled():
            self._warn(f"torch.compile lacks {lacking}: a kernel for each operator, so passes take longer")
        else:
            program.fuse(not_compiled(self.device))

    def _warn(self, message: str) -> None:
        """Logs what is slower or larger than it could be, once."""
        if message not in self._warned:
            self._warned.add(message)
            LOG.warning("%s: %s", self._directory, message)


def not_compiled(device: torch.device) -> Collection[Callable[..., Any]]:
    """Operators that Triton does not compile for a GPU."""
    return () if torch.cuda.get_device_capability(device) >= LOWEST_SM["FP8"] else WITH_FP8_CODES
