# SPDX-License-Identifier: Apache-2.0
"""Checks the plans of an engine directory against this machine, and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.plan import Here, check_plan
from dflash_trt.engine.plans.plan_runner import PlanRunner, Workspace
from dflash_trt.engine.plans.tensorrt_api import host_code, plugin_library
from dflash_trt.engine.recorded_graph import graph_tensors


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
