# SPDX-License-Identifier: Apache-2.0
"""Kernels of a draft pass on a GPU, counted without one; `estimate` prices as many (data/backends.json)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter import torch_executor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.torch import calls, scaled_linear
from dflash_trt.runtime.drafter.torch.graph_program import Program
from tests.engines import build, trained_engine
from tests.reference.synthetic import DraftSizes, write_random_draft

pytest.importorskip("triton")
SIZES = DraftSizes(
    hidden=2880, intermediate=256, num_heads=4, num_kv_heads=2, head_dim=64, num_taps=1, num_target_layers=36,
    block_size=10, vocab_size=96,
)  # fmt: skip
"""gpt-oss-120b's hidden size, over which norms sum."""
LAYERS, ONCE = 2, 2
"""Rotations, and the first norm."""


H100 = {
    "type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "warp_size": 32,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
}  # fmt: skip


def num_kernels(module: torch.nn.Module, inputs: Sequence[Tensor]) -> int:
    """Launches of the compiled module, for inputs of these sizes and strides on an H100."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    fake = FakeTensorMode()

    def like(x: Tensor, device: str) -> Tensor:
        with fake:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with fake:
        traced = make_fx(module, decomposition_table=select_decomp_table())(*(like(x, "cpu") for x in inputs))
    for node in traced.graph.nodes:  # indexing a tensor of CUDA's needs CUDA in torch, so the trace was the CPU's
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        if isinstance(value := node.meta.get("val"), Tensor):
            node.meta["val"] = like(value, "cuda")
    given = [like(x, "cuda") for x in inputs]
    graph = GraphLowering(traced, example_inputs=given, shape_env=None)  # type: ignore[arg-type]
    debug = V.set_debug_handler(DebugContext())  # type: ignore[no-untyped-call]
    with an_h100(), V.set_graph_handler(graph), V.set_fake_mode(fake), debug:
        graph.run(*given)
        code, _ = graph.codegen()
    return code.value.count(".run(")


@contextmanager
def an_h100() -> Iterator[None]:
    """What Inductor asks of the machine before it writes a kernel."""
    from torch._inductor.runtime.hints import DeviceProperties

    found = DeviceProperties(**H100)  # type: ignore[arg-type]
    answers: dict[str, Callable[..., Any]] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        "torch._inductor.scheduler.has_triton": lambda *_: True,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: found)))
        yield


def gpt_oss(directory: Path, recipe: str) -> Path:
    source = write_random_draft(directory / "base", dialect="gpt_oss", layer_types=["full_attention"] * LAYERS,
                                sizes=SIZES)  # fmt: skip
    if recipe != "bf16":
        source = directory / "draft"
        quantize_checkpoint(read_draft(directory / "base"), load_recipe(recipe), source)
    build(source, directory / "engine")
    return directory / "engine"


def counted(engine: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of each compiled function of a draft pass, in order."""
    counts: list[int] = []
    init = Program.__init__

    def compiled(module: torch.nn.Module) -> Callable[..., Any]:
        def call(*inputs: Tensor) -> Any:
            counts.append(num_kernels(module, inputs))
            return module(*inputs)

        return call

    def fused_init(self: Program, *args: Any) -> None:
        init(self, *args)
        self.fuse()

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(Program, "__init__", fused_init)
    monkeypatch.setattr(calls, "_compiled", calls._compiled.__wrapped__)  # of no other test, nor for one
    drafter = open_drafter(engine, read_manifest(engine), num_slots=1, executor="torch")
    counts.clear()
    drafter.draft([0], torch.randn(1, drafter.spec.block_size, drafter.spec.hidden_size))
    return counts


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_three_kernels_a_layer(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual, norm and quantisation twice, SiLU times up once; bias of q, k and v: the product, or the attention."""
    assert counted(gpt_oss(tmp_path, recipe), monkeypatch) == [ONCE, *[1] * 3 * LAYERS]


@pytest.mark.full
def test_of_a_trained_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_engine("tiny-qwen3")
    assert counted(engine, monkeypatch) == [ONCE, *[1] * 3 * read_manifest(engine).draft.num_layers]


@pytest.mark.full
def test_fp4_takes_two_more_before_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel makes scales and codes, one lays the scales out; a norm is its own, SiLU times up is not."""
    engine = gpt_oss(tmp_path, "nvfp4")
    monkeypatch.setattr(torch_executor, "patterns", lambda _: [scaled_linear.fp4_linear])
    monkeypatch.setattr(scaled_linear, "fp4_product", lambda x, *given: torch.zeros(len(x), len(given[2])).bfloat16())
    assert counted(engine, monkeypatch) == [ONCE + 2, *[2, 3, 2, 3] * (LAYERS - 1), 2, 3, 2, 1]
