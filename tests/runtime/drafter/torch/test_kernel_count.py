# SPDX-License-Identifier: Apache-2.0
"""Kernels of a draft pass on a GPU, counted without one; `estimate` assumes the same number (data/backends.json)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.device import fused
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter import torch_executor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.torch import calls, scaled_linear
from tests.engines import build, trained_engine
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.drafter.torch.inductor import (
    compile_as_on_gpu,
    compile_kernels,
    num_kernels,
    written,
    written_as_traced,
)

pytestmark = pytest.mark.full

CompilationError = pytest.importorskip("triton").CompilationError
SIZES = DraftSizes(
    hidden=2880, intermediate=256, num_heads=4, num_kv_heads=2, head_dim=64, num_taps=1, num_target_layers=36,
    block_size=10, vocab_size=96,
)  # fmt: skip
"""gpt-oss-120b's hidden size, over which norms sum."""
LAYERS, ONCE = 2, 2
"""Rotations, and the first norm."""


def gpt_oss(directory: Path, recipe: str) -> Path:
    source = write_random_draft(directory / "base", dialect="gpt_oss", layer_types=["full_attention"] * LAYERS,
                                sizes=SIZES)  # fmt: skip
    if recipe != "bf16":
        source = directory / "draft"
        quantize_checkpoint(read_draft(directory / "base"), load_recipe(recipe), source)
    build(source, directory / "engine")
    return directory / "engine"


def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuses programs of drafters to come as on a GPU; layers do not share their functions."""
    compile_as_on_gpu(monkeypatch)
    monkeypatch.setattr(calls, "fused_function", calls.fused_function.__wrapped__)


def counted(engine: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels of each compiled function of a draft pass, in order."""
    counts: list[int] = []

    def compiled(module: torch.nn.Module) -> Callable[..., Any]:
        def call(*inputs: Tensor) -> Any:
            counts.append(num_kernels(module, inputs))
            return module(*inputs)

        return call

    fuse(monkeypatch)
    monkeypatch.setattr(fused, "compiled", compiled)
    drafter = open_drafter(engine, read_manifest(engine), num_slots=1, executor="torch")
    counts.clear()
    drafter.run([0], torch.randn(1, drafter.spec.block_size, drafter.spec.hidden_size))
    return counts


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_three_kernels_a_layer(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual, norm and quantisation twice, SiLU times up once; bias of q, k and v: the product, or the attention."""
    assert counted(gpt_oss(tmp_path, recipe), monkeypatch) == [ONCE, *[1] * 3 * LAYERS]


def test_of_a_trained_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_engine("tiny-qwen3")
    assert counted(engine, monkeypatch) == [ONCE, *[1] * 3 * read_manifest(engine).draft.num_layers]


def test_fp4_takes_two_more_before_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel makes scales and codes, one lays the scales out; a norm is its own, SiLU times up is not."""
    engine = gpt_oss(tmp_path, "nvfp4")
    monkeypatch.setattr(torch_executor, "patterns", lambda _: [scaled_linear.fp4_linear])
    monkeypatch.setattr(scaled_linear, "fp4_product", lambda x, *given: torch.zeros(len(x), len(given[2])).bfloat16())
    assert counted(engine, monkeypatch) == [ONCE + 2, *[2, 3, 2, 3] * (LAYERS - 1), 2, 3, 2, 1]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_triton_compiles_them(capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a number of requests, and for any; for a GPU without FP8, too, whose codes Inductor 2.13 leaves to torch."""
    counts: list[tuple[bool, int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        takes_any = any(isinstance(value, torch.SymInt) for value in inputs)
        code = written_as_traced(graph, capability)
        counts.append((takes_any, compile_kernels(code, capability, tmp_path)))
        return graph.forward

    fuse(monkeypatch)
    monkeypatch.setattr(fused, "compiled", partial(fused.compiled, backend=backend))
    engine = gpt_oss(tmp_path, "fp8")
    drafter = open_drafter(engine, read_manifest(engine), num_slots=4, executor="torch")
    for num_requests in (1, 2, 4):
        blocks = torch.randn(num_requests, drafter.spec.block_size, drafter.spec.hidden_size)
        drafter.run(list(range(num_requests)), blocks)
    assert {takes_any for takes_any, _ in counts} == {False, True}
    assert min(count for _, count in counts) >= 1


class Codes(torch.nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_linear.packed_fp4(x, scale)


def test_triton_compiles_fp4_codes(tmp_path: Path) -> None:
    """For what has their product; what was written for a GPU with FP8 is none for an older one."""
    inputs = torch.randn(130, 256).bfloat16(), torch.tensor(0.5)
    for capability in ((10, 0), (12, 0)):
        assert compile_kernels(written(Codes(), inputs, capability), capability, tmp_path) == 2
    with pytest.raises(CompilationError, match="fp8e4nv not supported"):
        compile_kernels(written(Codes(), inputs, (9, 0)), (8, 0), tmp_path)
