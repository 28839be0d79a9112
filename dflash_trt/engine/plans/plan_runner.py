# SPDX-License-Identifier: Apache-2.0
"""One plan in TensorRT, with a context and a CUDA graph for each of its profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.plans.jit_cache import JitCache, jit_cache_file
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import Plan
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES
from dflash_trt.engine.recorded_graph import RecordedGraph
from dflash_trt.engine.signatures import Graph
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
    """One plan; as one call runs at a time, its contexts share a workspace."""

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
        outputs = [port.name for port in graph.outputs]
        super().__init__(tensors, outputs, sizes, self._record)
        if self._jit_cache is not None:
            self._jit_cache.save()

    def close(self) -> None:
        """Frees the plan and its contexts now."""
        super().close()
        self._contexts.clear()

    def _configure(self, config: Any, file: Path) -> JitCache:
        """Compiles kernels for each profile's shapes before the first call: a captured graph would keep fallbacks.

        CUDA graphs of TensorRT-RTX's own are off, as ours capture its calls.
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
