# SPDX-License-Identifier: Apache-2.0
"""A TensorRT plan as one call for each size: contexts, addresses and CUDA graphs are set up once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engine.plans.launcher import Launcher
from dflash_trt.engine.plans.plan import Plan
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


class PlanRunner:
    """One plan, with a context and a CUDA graph for each of its profiles, whose leading axis is fixed.

    All use the leading rows of the same tensors. One call runs at a time, so the contexts share one workspace, too.
    """

    def __init__(
        self, trt: Any, runtime: Any, file: Path, plan: Plan, *, axis: str, tensors: Mapping[str, Tensor],
        cached: frozenset[str], launcher: Launcher, workspace: Workspace | None = None,
    ) -> None:  # fmt: skip
        """`tensors` are inputs and outputs by name, sized for the largest profile; those in `cached` have no `axis`.

        `workspace` is that of plans that run one after the other. Raises EngineError when TensorRT refuses the plan, a
        shape or an address.
        """
        self._file = file
        self._trt = trt
        self._launcher = launcher
        self.tensors = tensors
        """Inputs and outputs, by name."""
        self._cached = cached
        self._engine = runtime.deserialize_cuda_engine(file.read_bytes())
        self._expect(self._engine is not None, "a plan that this TensorRT loads")
        self.sizes = [profile[axis].max for profile in plan.profiles]
        """Rows of each profile, rising."""
        self._memory = (workspace or Workspace()).of(self._engine.device_memory_size_v2, launcher.device)
        self._contexts = [self._context(index, rows) for index, rows in enumerate(self.sizes)]
        self._calls: list[Callable[[], None]] = [launcher.record(self._work(context)) for context in self._contexts]

    def padding(self, rows: int) -> int:
        """Rows that `run` computes beyond `rows`."""
        return self.sizes[bisect_left(self.sizes, rows)] - rows

    def run(self, rows: int) -> None:
        """Queues the smallest call that has `rows` rows."""
        self._calls[bisect_left(self.sizes, rows)]()

    def close(self) -> None:
        """Frees the plan now; in its reference cycles it would wait for Python's garbage collector."""
        self._calls.clear()
        self._contexts.clear()
        self.tensors = {}

    def _context(self, profile: int, rows: int) -> Any:
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self._expect(context is not None, "a plan whose calls fit this GPU's memory")
        try:
            chosen = context.set_optimization_profile_async(profile, self._launcher.handle)
        except RuntimeError:  # the bindings' way to say that the call returned false
            chosen = False
        self._expect(chosen, f"profile {profile}")
        context.set_device_memory(self._memory.data_ptr(), self._memory.nbytes)
        for name, tensor in self.tensors.items():
            if self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                shape = tuple(tensor.shape) if name in self._cached else (rows, *tensor.shape[1:])
                self._expect(context.set_input_shape(name, shape), f"input {name} of shape {shape}")
            self._expect(context.set_tensor_address(name, tensor.data_ptr()), f"tensor {name}")
        return context

    def _work(self, context: Any) -> Callable[[], None]:
        def work() -> None:
            self._expect(context.execute_async_v3(self._launcher.handle), "a call that TensorRT queues")

        return work

    def _expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise EngineError(
                f"{self._file}: expected {what}, found it refused by TensorRT {self._trt.__version__} (messages above)",
                hint=f"rebuild: dflash-trt build --plans-for {quoted(self._file.parent)}",
            )
