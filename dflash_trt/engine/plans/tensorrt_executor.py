# SPDX-License-Identifier: Apache-2.0
"""The two graphs as TensorRT plans: one launch a call, everything bound once. Not yet run with libnvinfer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.plan_loader import PlanLoader
from dflash_trt.engine.plans.segmented_plan import SegmentedPlan
from dflash_trt.engine.recorded_executor import RecordedExecutor
from dflash_trt.engine.recorded_graph import SizedGraph
from dflash_trt.engine.signatures import num_pages_for, segment_name
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted


class TensorRTExecutor(RecordedExecutor):
    """An Executor on one GPU: torch's current one, onto which TensorRT loads a plan."""

    def __init__(
        self, directory: Path, manifest: Manifest, launcher: Launcher, all_reduce: AllReduce | None = None
    ) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        A shard needs an `all_reduce`. Raises EngineError without plans.
        """
        for name in manifest.graphs:
            if name not in manifest.plans:
                raise EngineError(
                    f"{directory}: expected {name}.plan, found an engine for ONNX Runtime only",
                    hint=f"on the GPU machine: dflash-trt build --plans-for {quoted(directory)}",
                )
        super().__init__(manifest, launcher)
        assert (manifest.shard is None) == (all_reduce is None), "a shard needs an all_reduce"
        self._all_reduce = all_reduce
        self._draft_plan = manifest.plans["draft" if all_reduce is None else segment_name(0)]
        self._directory = directory
        self._loader: PlanLoader | None = None

    def cache_rows(self, num_slots: int) -> int:
        """max_seq_len of the plans. Raises EngineError for more slots than the draft plan was built for."""
        self._check_slots(num_slots)
        return (self._manifest.plan_options or PlanOptions()).max_seq_len

    def check(self) -> None:
        """Checks the plans without reading them.

        Raises MissingDependencyError without GPU, TensorRT or plugin, EngineError when the plans were built for another
        machine or TensorRT.
        """
        self._loader = self._loader or PlanLoader(self._directory, self._manifest, self._launcher)

    def load(self) -> None:
        """Reads the context plan. Raises what `check` does, and EngineError when TensorRT refuses the plan."""
        self.check()
        super().load()

    def _load_context(self) -> SizedGraph:
        return self._checked().load("context", "T", {})

    def _load_draft(self, cached: Mapping[str, Tensor]) -> SizedGraph:
        if self._all_reduce is None:
            return self._checked().load("draft", "B", cached)
        return SegmentedPlan(self._checked(), self._manifest.draft.num_layers, cached, self._all_reduce)

    def _checked(self) -> PlanLoader:
        assert self._loader is not None, "load comes first"
        return self._loader

    def _max_blocks(self) -> int:
        return self._draft_plan.profiles[-1]["B"].max

    def _max_pages(self) -> int:
        return num_pages_for(self.cache_rows(1))

    def _check_slots(self, num_slots: int) -> None:
        most = self._draft_plan.profiles[0]["slots"].max
        if num_slots > most:
            raise EngineError(
                f"{self._directory}: expected at most {most} slots, for which the plan was built, found {num_slots}",
                hint=f"dflash-trt build --plans-for {quoted(self._directory)} --max-batch-size {num_slots}",
            )
