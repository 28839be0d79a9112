# SPDX-License-Identifier: Apache-2.0
"""The graphs as TensorRT plans: one launch a call, everything bound once. Not yet run with libnvinfer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.plan import Here, PlanOptions, check_plan
from dflash_trt.engine.plans.plan_runner import PlanRunner, Workspace
from dflash_trt.engine.plans.tensorrt_api import host_code, plugin_library
from dflash_trt.engine.recorded_executor import RecordedExecutor
from dflash_trt.engine.recorded_graph import SizedGraph, graph_tensors
from dflash_trt.engine.signatures import CORRELATOR, num_pages_for, num_segments, segment_name, stream_names
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

    def _load_correlator(self) -> SizedGraph:
        return self._checked().load(CORRELATOR, "B", {})

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


class PlanLoader:
    """TensorRT with the plugin that plans need, after all plans were checked against this machine."""

    def __init__(self, directory: Path, manifest: Manifest, launcher: Launcher) -> None:
        """Raises MissingDependencyError without GPU, TensorRT or plugin, EngineError for plans of another machine."""
        self._directory = directory
        self._manifest = manifest
        self._launcher = launcher
        plans = manifest.plans.values()
        runtime = next(iter(plans)).runtime
        self._trt, self._gpu = tensorrt_api.load_tensorrt(runtime), machine.gpu(launcher.device.index or 0)
        library = plugin_library() if any(plan.needs_plugin for plan in plans) else None
        plugin_sha256 = None if library is None else host_code(library)
        here = Here(runtime=runtime, version=str(self._trt.__version__), gpu=self._gpu, plugin_sha256=plugin_sha256)
        for plan in plans:
            check_plan(plan, directory, manifest.sha256, here)
        if library is not None:
            plugin = manifest.plugin
            tensorrt_api.load_plugin(self._trt, library, plugin.name, plugin.version, plugin.namespace)
        self._runtime = self._trt.Runtime(tensorrt_api.make_logger(self._trt))
        if any(plan.version_compatible for plan in plans):
            self._runtime.engine_host_code_allowed = True  # the plan carries the plugin's code; its sha256 is checked

    def load(
        self, name: str, axis: str, cached: Mapping[str, Tensor], given: Mapping[str, Tensor] = MappingProxyType({}),
        workspace: Workspace | None = None,
    ) -> PlanRunner:  # fmt: skip
        """The plan of the graph `name`, whose calls differ in `axis`, with inputs and outputs for its largest profile.

        Uses the tensors in `cached`, which have no `axis`, and in `given`, and allocates the others. Raises EngineError
        when TensorRT refuses the plan or a tensor.
        """
        graph, plan = self._manifest.graphs[name], self._manifest.plans[name]
        largest = {axis: size.max for axis, size in plan.profiles[-1].items()}
        tensors = graph_tensors(graph, largest, {**given, **cached}, self._launcher.device)
        return PlanRunner(
            self._trt,
            self._runtime,
            self._directory / plan.file,
            plan,
            graph,
            axis=axis,
            tensors=tensors,
            cached=frozenset(cached),
            launcher=self._launcher,
            gpu=self._gpu,
            workspace=workspace,
        )


class SegmentedPlan:
    """A SizedGraph of a shard's draft plans, which queues an all-reduce between each two."""

    def __init__(
        self, loader: PlanLoader, num_layers: int, cached: Mapping[str, Tensor], all_reduce: AllReduce
    ) -> None:
        """`cached` is where the context lies. Raises EngineError when TensorRT refuses a plan."""
        self._all_reduce = all_reduce
        self._plans: list[PlanRunner] = []
        tensors: dict[str, Tensor] = {}
        workspace = Workspace()
        for i in range(num_segments(num_layers)):
            given = dict(tensors)
            if i >= 2:  # the residual stream alternates between two buffers
                given |= {new: given[old] for old, new in zip(stream_names(i - 1), stream_names(i + 1), strict=True)}
            plan = loader.load(segment_name(i), "B", cached, given, workspace)
            self._plans.append(plan)
            tensors |= plan.tensors
        blocks = tensors["noise_embeds"]
        tensors["hidden"] = tensors["hidden"].flatten()[: blocks.numel()].view_as(blocks)
        self.tensors: Mapping[str, Tensor] = tensors
        self.outputs = self._plans[-1].outputs
        self.sizes = self._plans[0].sizes

    def padding(self, rows: int) -> int:
        """Blocks that `run` computes beyond `rows`."""
        return self._plans[0].padding(rows)

    def run(self, rows: int) -> None:
        """Queues all segments and the all-reduces between them."""
        num_tokens = (rows + self.padding(rows)) * self.tensors["noise_embeds"].shape[1]
        for i, plan in enumerate(self._plans):
            if i:
                _, partial = stream_names(i)
                self._all_reduce(self.tensors[partial][:num_tokens])
            plan.run(rows)

    def close(self) -> None:
        """Frees the plans now."""
        for plan in self._plans:
            plan.close()
        self._plans.clear()
        self.tensors = {}
