# SPDX-License-Identifier: Apache-2.0
"""The kernel, called with a case's CUDA tensors: by the binding, or as TensorRT calls it."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path

import torch

from dflash_trt import _C
from dflash_trt.device.attention_kernel import runs_on
from tests.plugins import abi
from tests.plugins.cases import BF16, F16, FP8, Case
from tests.plugins.tensors import Guarded, Tensors, attributes, inputs, output

BUILD = "pip install -e . -C cmake.define.DFLASH_CUDA=ON"
EXPERIMENTAL_BUILD = f"{BUILD} -C cmake.define.DFLASH_EXPERIMENTAL_KERNELS=ON"


def why_no_launch() -> str | None:
    """Why kernels cannot run here, with what to do; None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU: run this on a machine with one, with a CUDA build of torch"
    compiled = _C.cuda_architectures()
    if not compiled:
        return f"dflash_trt was built without its CUDA kernels: {BUILD}"
    capability = torch.cuda.get_device_capability()
    if not runs_on(compiled, *capability):
        name = torch.cuda.get_device_name()
        return f"the kernels were compiled for {compiled}, and {name} has compute capability {capability}"
    return None


def takes(case: Case, capability: tuple[int, int]) -> bool:
    """Whether such a GPU has the number format of the case's cache."""
    return case.cache_dtype is not FP8 or capability >= (8, 9)


def moved(tensors: Tensors, device: str) -> Tensors:
    """Copies on another device."""
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    return Tensors(**{name: None if value is None else value.to(device, copy=True) for name, value in values.items()})


class Launch:
    """A call with all it needs in place, to be started any number of times."""

    def __init__(self, case: Case, tensors: Tensors, workspace: Guarded | None = None, kernel: str = "best") -> None:
        self._case = case
        self._kernel = kernel
        self._out = output(case, tensors)
        self.inputs = inputs(case, tensors)
        size = _C.kv_injection_attention_workspace_bytes(attributes(case), list(self.inputs.values()), self._out.tensor)
        self.workspace = workspace or Guarded((size,), torch.uint8, tensors.q.device)

    @property
    def out(self) -> torch.Tensor:
        return self._out.tensor

    def start(self) -> None:
        """On torch's current stream."""
        _C.kv_injection_attention(
            attributes(self._case), list(self.inputs.values()), self.out, self.workspace.tensor,
            torch.cuda.current_stream().cuda_stream, host_slot_ids=self._case.slot_of,
            host_context_lengths=self._case.context_lengths, kernel=self._kernel,
        )  # fmt: skip

    def run(self) -> torch.Tensor:
        """The output [B, S, N*D], when it is there and nothing around it was written."""
        self.start()
        torch.cuda.synchronize()
        self._out.assert_guarded()
        self.workspace.assert_guarded()
        return self.out


TYPES = {
    BF16: abi.BF16, F16: abi.HALF, FP8: abi.FP8, torch.float32: abi.FLOAT, torch.int32: abi.INT32,
    torch.int64: abi.INT64,
}  # fmt: skip
creator = cache(abi.Creator)
"""The creator of a plugin library, which stays loaded."""


class PluginLaunch(Launch):
    """A call through the virtual functions of a plugin library, on device addresses, to be started any number of times.

    The library may be of another commit: what it has no attribute for is left out, unless the case has it.
    """

    def __init__(self, library: Path, case: Case, tensors: Tensors, workspace: Guarded | None = None) -> None:
        known = {name for name, _ in creator(library).field_names()}
        given, default = case.attributes(), Case(name="").attributes()
        if lacking := [name for name, value in given.items() if name not in known and value != default[name]]:
            raise ValueError(f"{library}: expected a plugin that has {lacking[0]}, found {', '.join(sorted(known))}")
        made = creator(library).create([abi.attribute(name, given[name]) for name in given if name in known], abi.BUILD)
        if made is None:
            raise ValueError(f"{library}: expected a plugin of {case.name}; the library has printed why there is none")
        self._out, self.inputs = output(case, tensors), inputs(case, tensors)
        every = (*self.inputs.values(), self.out)
        shapes = [(tuple(tensor.shape), TYPES[tensor.dtype]) for tensor in every]
        profile, descs = ([make(*shape) for shape in shapes] for make in (abi.dynamic, abi.desc))
        assert made.configure(profile[:-1], profile[-1:]) == 0
        size = made.workspace(profile[:-1], profile[-1:])
        self.workspace = workspace or Guarded((size,), torch.uint8, tensors.q.device)
        self._running, self._descs = made.attach(), descs
        assert self._running.on_shape_change(descs[:-1], descs[-1:]) == 0
        self._addresses = [tensor.data_ptr() for tensor in every]

    def start(self) -> None:
        """On torch's current stream."""
        workspace, stream = self.workspace.tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        if self._running.enqueue(self._descs[:-1], self._descs[-1], self._addresses, workspace, stream) != 0:
            raise RuntimeError("the plugin has printed why it did not start")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For torch.equal, to which a NaN is not equal to itself."""
    return tensor.contiguous().view(torch.uint8)
