# SPDX-License-Identifier: Apache-2.0
"""Kernels that Inductor makes for a GPU that is not there: it joins and writes them, and Triton is not asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dflash_trt.device import fused
from dflash_trt.runtime.drafter.torch import calls
from dflash_trt.runtime.drafter.torch.graph_program import Program

H100 = {
    "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "warp_size": 32,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
}  # fmt: skip


def compile_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks torch.compile for what it would be asked on a GPU; programs to come share no function with other tests."""
    init = Program.__init__

    def fused_init(self: Program, *args: Any) -> None:
        init(self, *args)
        self.fuse()

    monkeypatch.setattr(fused, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(fused, "why_not_compiled", lambda: None)
    monkeypatch.setattr(fused, "FAILED", set())
    monkeypatch.setattr(calls, "fused_function", cache(calls.fused_function.__wrapped__))
    monkeypatch.setattr(Program, "__init__", fused_init)


def num_kernels(module: torch.nn.Module, inputs: Sequence[Tensor]) -> int:
    """Launches of the compiled module, for inputs of these sizes and strides on an H100: its own, and torch's."""
    _, call = written(module, inputs).split("def call(")
    return len(re.findall(r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(", call))


def written(module: torch.nn.Module, inputs: Sequence[Tensor], capability: tuple[int, int] = (9, 0)) -> str:
    """Inductor's code of the module, with its kernels, for inputs of these sizes and strides on such a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()
    return _written(module, [_like(x, "cpu", fake) for x in inputs], fake, capability)


def written_as_traced(graph: torch.fx.GraphModule, capability: tuple[int, int] = (9, 0)) -> str:
    """Inductor's code of a graph that torch.compile has traced, for sizes that are numbers or any, as it says."""
    from torch._subclasses.fake_tensor import FakeTensor

    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    (fake,) = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    return _written(graph, inputs, fake, capability)


def _like(value: Any, device: str, fake: Any) -> Any:
    """A tensor without values; a size as it is."""
    if not isinstance(value, Tensor):
        return value
    with fake:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _written(module: torch.nn.Module, inputs: Sequence[Any], fake: Any, capability: tuple[int, int]) -> str:
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake:
        traced = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    for node in traced.graph.nodes:  # indexing a tensor of CUDA's needs CUDA in torch, so the trace was the CPU's
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        if "val" in node.meta:
            node.meta["val"] = _like(node.meta["val"], "cuda", fake)
    given = [_like(x, "cuda", fake) for x in inputs]
    graph = GraphLowering(traced, example_inputs=given, shape_env=fake.shape_env)
    debug = V.set_debug_handler(DebugContext())  # type: ignore[no-untyped-call]
    with a_gpu(*capability), V.set_graph_handler(graph), V.set_fake_mode(fake), debug:
        graph.run(*given)
        code, _ = graph.codegen()
    return str(code.value)


def compile_kernels(code: str, capability: tuple[int, int], directory: Path) -> int:
    """Compiles the kernels in Inductor's code by Triton, for such a GPU, and counts them."""
    return len(compile_ptx(code, capability, directory))


def compile_ptx(code: str, capability: tuple[int, int], directory: Path) -> list[str]:
    """PTX of each kernel in Inductor's code, which Triton compiles for such a GPU."""
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: list[tuple[dict[str, Any], Any]] = []

    def heuristic(*_: Any, triton_meta: dict[str, Any], **__: Any) -> Callable[[Any], None]:
        return lambda function: found.append((triton_meta, function))

    for number, source in enumerate(re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL)):
        file = directory / f"kernel{number}.py"
        file.write_text(source)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
            for kind in ("pointwise", "reduction", "persistent_reduction"):
                stack.enter_context(mock.patch.object(triton_heuristics, kind, heuristic))
            exec(compile(source, file, "exec"), {"__file__": str(file), "__name__": file.stem})
    ptx = []
    for meta, function in found:
        signature = {name: meta["signature"].get(name, "constexpr") for name in function.arg_names}
        blocks = {name: 32 for name, kind in signature.items() if kind == "constexpr"}
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        source = ASTSource(function, signature, {**blocks, **meta["constants"]})
        options = {"enable_fp_fusion": meta["enable_fp_fusion"]}
        ptx.append(triton.compile(source, target=target, options=options).asm["ptx"])
    return ptx


@contextmanager
def a_gpu(major: int, minor: int) -> Iterator[None]:
    """Device properties that Inductor reads before it writes a kernel."""
    from torch._inductor.runtime.hints import DeviceProperties

    found = DeviceProperties(**{**H100, "cc": 10 * major + minor, "major": major})  # type: ignore[arg-type]
    names = {"name": "NVIDIA H100", "gcnArchName": ""}
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=132, total_memory=80 << 30, **names)
    answers: dict[str, Callable[..., Any]] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (major, minor),
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        "torch._inductor.scheduler.has_triton": lambda *_: True,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: found)))
        yield
