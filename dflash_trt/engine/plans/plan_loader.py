# SPDX-License-Identifier: Apache-2.0
"""Loads and runs the plan files of an engine directory on this machine, whole or in segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.jit_cache import JitCache, jit_cache_file
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import Here, Plan, check_plan
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, host_code, plugin_library
from dflash_trt.engine.recorded_executor import RecordedGraph, graph_tensors
from dflash_trt.engine.signatures import Graph, num_segments, segment_name, stream_names
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted


class Workspace:
    """Scratch memory that plans share; grows to the largest need, and a plan keeps what it was given."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, num_bytes: int, device: torch.device) -> Tensor:
        """Scratch memory of at least `num_bytes`."""
        if self._memory is None or self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory


class PlanRunner(RecordedGraph):
    """One plan, with a context and a CUDA graph for each of its profiles.

    One call runs at a time, so the contexts share one workspace.
    """

    def __init__(
        self, trt: Any, runtime: Any, file: Path, plan: Plan, graph: Graph, *, axis: str, tensors: Mapping[str, Tensor],
        cached: frozenset[str], launcher: Launcher, gpu: Gpu, workspace: Workspace | None = None,
    ) -> None:  # fmt: skip
        """`tensors` are inputs and outputs by name, sized for the largest profile; those in `cached` have no `axis`.

        `workspace` is that of plans that run one after the other. Raises EngineError when TensorRT refuses the plan, a
        shape or an address.
        """
        self._file = file
        self._trt = trt
        self._title = f"{RUNTIMES[plan.runtime].title} {trt.__version__}"
        self._launcher = launcher
        self.tensors = tensors
        self._inputs = {port.name: port for port in graph.inputs}
        self._axis = axis
        self._cached = cached
        self._engine = runtime.deserialize_cuda_engine(file.read_bytes())
        self._expect(self._engine is not None, "a plan that this TensorRT loads")
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._jit_cache: JitCache | None = None
        self._how: Any = strategy  # the argument of create_execution_context
        if plan.runtime == "tensorrt_rtx":
            self._how = self._engine.create_runtime_config()
            self._how.set_execution_context_allocation_strategy(strategy)
            self._jit_cache = self._configure(self._how, jit_cache_file(file, gpu))
        sizes = [profile[axis].max for profile in plan.profiles]
        self._memory = (workspace or Workspace()).of(self._engine.device_memory_size_v2, launcher.device)
        self._contexts = {rows: self._context(index, rows) for index, rows in enumerate(sizes)}
        super().__init__(tensors, sizes, self._record)
        if self._jit_cache is not None:
            self._jit_cache.save()

    def close(self) -> None:
        """Frees the plan and its contexts now."""
        super().close()
        self._contexts.clear()

    def _configure(self, config: Any, file: Path) -> JitCache:
        """Kernels for each profile's shapes before the first call: a graph captured after it would keep fallbacks.

        TensorRT-RTX captures none of its own inside ours.
        """
        trt = self._trt
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        runtime_cache = config.create_runtime_cache()
        jit_cache = JitCache(runtime_cache, file)
        self._expect(config.set_runtime_cache(runtime_cache), "a runtime cache")
        return jit_cache

    def _context(self, profile: int, rows: int) -> Any:
        context = self._engine.create_execution_context(self._how)
        self._expect(context is not None, "a plan whose calls fit this GPU's memory")
        try:
            chosen = context.set_optimization_profile_async(profile, self._launcher.handle)
        except RuntimeError:  # the bindings' way to say that the call returned false
            chosen = False
        self._expect(chosen, f"profile {profile}")
        context.set_device_memory(self._memory.data_ptr(), self._memory.nbytes)
        for name, tensor in self.tensors.items():
            if (port := self._inputs.get(name)) is not None:
                shape = tuple(tensor.shape if name in self._cached else port.sizes({self._axis: rows}))
                self._expect(context.set_input_shape(name, shape), f"input {name} of shape {shape}")
            self._expect(context.set_tensor_address(name, tensor.data_ptr()), f"tensor {name}")
        return context

    def _record(self, rows: int) -> Callable[[], None]:
        context, launcher = self._contexts[rows], self._launcher

        def work() -> None:
            self._expect(context.execute_async_v3(launcher.handle), "a call that TensorRT queues")

        def check() -> None:
            if self._jit_cache is not None:
                self._expect(context.is_stream_capturable(launcher.handle), "a call that a CUDA graph can capture")

        return launcher.record(work, check)

    def _expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise EngineError(
                f"{self._file}: expected {what}, found it refused by {self._title} (messages above)",
                hint=f"rebuild: dflash-trt build --plans-for {quoted(self._file.parent)}",
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
    """The draft graph in segments with all-reduces between them; has the interface of PlanRunner."""

    def __init__(
        self, loader: PlanLoader, num_layers: int, cached: Mapping[str, Tensor], all_reduce: AllReduce
    ) -> None:
        """`cached` is where the context lies. Raises EngineError when TensorRT refuses a plan."""
        self._all_reduce = all_reduce
        self._plans: list[PlanRunner] = []
        self.tensors: dict[str, Tensor] = {}
        """Inputs and outputs, by name."""
        workspace = Workspace()
        for i in range(num_segments(num_layers)):
            given = dict(self.tensors)
            if i >= 2:  # the residual stream alternates between two buffers
                given |= {new: given[old] for old, new in zip(stream_names(i - 1), stream_names(i + 1), strict=True)}
            plan = loader.load(segment_name(i), "B", cached, given, workspace)
            self._plans.append(plan)
            self.tensors |= plan.tensors
        blocks = self.tensors["noise_embeds"]
        self.tensors["hidden"] = self.tensors["hidden"].flatten()[: blocks.numel()].view_as(blocks)
        self.sizes = self._plans[0].sizes
        """Blocks of each profile, rising."""

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
