# SPDX-License-Identifier: Apache-2.0
"""Kernels: as TensorRT's builder and our own executor have them, and as a GPU took them."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.observe.estimate.drafter_pass import PLAN, dflash_shape
from dflash_trt.observe.estimate.kernel_times import attention_tables, kernel_seconds
from dflash_trt.observe.estimate.shapes import SmallKernels, backends
from dflash_trt.observe.estimate.step_cost import StepLoad
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.torch.calls import VIEWS, fused
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch.onnx_graph import OnnxGraph
from dflash_trt.runtime.drafter.torch.scaled_linear import patterns
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights
from tests.engine.plans.plan_layers import num_kernels
from tests.engine.plans.rtx import GOLDEN, PAIRS, RECIPES
from tests.engines import trained_engine
from tests.observe.estimate.systems import ENGINE, MOE, model_of
from tests.paths import FIXTURES
from tools.measured_passes import MeasuredPass, measured_passes, predict
from tools.recipe_tables import DRAFT


@pytest.mark.parametrize("measured", measured_passes().microseconds, ids=str)
def test_a_pass_as_an_h100_took_it(measured: MeasuredPass) -> None:
    assert predict(measured, measured_passes().backend) == pytest.approx(measured.microseconds, rel=0.1)
    assert predict(measured, PLAN) < predict(measured, "torch") < 0.97 * measured.microseconds


@pytest.mark.parametrize(
    ("draft", "recipe", "layers"),
    [
        (DRAFT, "bf16", 66), (DRAFT, "fp8", 66), (DRAFT, "mixed-nvfp4-fp8", 82), (DRAFT, "nvfp4-native", 90),
        (DRAFT, "nvfp4", 98), (DRAFT, "int4-w4a16", 66), ("z-lab/Qwen3-8B-DFlash-b16", "bf16", 42),
        ("z-lab/Qwen3-8B-DFlash-b16", "fp8", 42), ("z-lab/Qwen3-8B-DFlash-b16", "nvfp4", 62),
    ],
)  # fmt: skip
def test_a_plan_has_the_layers_that_the_builder_left(draft: str, recipe: str, layers: int) -> None:
    """TensorRT-RTX 1.7.1's list, GEMMs and attention among them: five of each draft layer."""
    spec = published_drafts()[draft].spec
    shape = dflash_shape(spec, load_recipe(recipe).algorithms(spec.linear_modules()), backend=PLAN)
    assert shape.small_kernels.count + 5 * spec.num_layers == layers


def test_rows_that_are_not_padded_cost_a_kernel_a_gemm() -> None:
    """A DFlash2 draft in NVFP4 whose blocks do not fill 128 rows evenly."""
    even = published_drafts()["z-lab/Qwen3.8-27B-DFlash2"].spec
    algorithms = load_recipe("nvfp4").algorithms(even.linear_modules())
    odd = msgspec.structs.replace(even, block_size=10)
    few, more = (dflash_shape(spec, algorithms, backend=PLAN).small_kernels.count for spec in (even, odd))
    assert more - few == 4 * even.num_layers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("draft", PAIRS)
def test_a_plan_has_the_kernels_that_are_counted_in_every_run(draft: str, recipe: str) -> None:
    """Counts of tests/golden/plan_layers.json, which follow the graphs; a shape_call is no kernel."""
    spec = read_draft(FIXTURES / draft).spec
    shape = dflash_shape(spec, load_recipe(recipe).algorithms(spec.linear_modules()), backend=PLAN)
    layers = json.loads(GOLDEN.read_text())[draft][recipe]["draft"]
    assert shape.small_kernels.count + 5 * spec.num_layers == num_kernels(layers)


def test_the_executor_has_the_runs_that_it_compiles() -> None:
    """Each run of elementwise calls is a kernel: of the gpt-oss fixture, whose projections have biases, in BF16."""
    engine = trained_engine("tiny-gpt-oss")
    cpu = torch.device("cpu")
    program = Program(OnnxGraph(engine, "draft.onnx", StoredWeights(engine, cpu)), ("hidden",), patterns(cpu))
    calls = fused(program.calls, program.outputs)
    names = [getattr(call.operator, "__name__", "compiled") for call in calls if call.operator not in VIEWS]
    num_layers = names.count("attend")
    assert names.count("gemm") + names.count("linear") == 4 * num_layers
    ours = backends()["torch"]
    # RoPE shares the first run, whose shapes make two kernels of it; the copy of the output is no call.
    assert names.count("compiled") == num_layers * sum(each.count for each in ours.layer) + ours.once - 2
    assert len(names) == names.count("compiled") + 5 * num_layers


def test_ranks_share_what_heads_and_channels_move() -> None:
    spec = published_drafts()[DRAFT].spec
    kernels = dflash_shape(spec, {}, backend="sglang").small_kernels
    qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    assert kernels.hidden_values == spec.num_layers * 2 * 4 * spec.hidden_size
    assert kernels.shared_values == spec.num_layers * (4 * qkv + 3 * spec.intermediate_size)
    assert dflash_shape(spec, {}).small_kernels == SmallKernels()


H200, H100 = known_gpu("h200").memory_bandwidth, known_gpu("h100").memory_bandwidth


def test_measured_cells_are_what_was_measured() -> None:
    for table in attention_tables().tables:
        heads = (table.num_key_value_heads, table.head_dim, table.cache_bytes)
        for requests, rows, microseconds in table.microseconds:
            assert kernel_seconds(*heads, requests, rows, H200) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("requests", "rows", "microseconds"), [(1, 512, 22), (16, 4096, 72), (64, 4096, 239), (16, 32768, 395)]
)
def test_another_gpu_is_scaled_by_its_memory(requests: int, rows: int, microseconds: float) -> None:
    """An H100's times, which no constant was fitted to: benchmarks/RESULTS.md, below the H200's table."""
    assert kernel_seconds(8, 64, 2, requests, rows, H100) == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_bytes", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_more_work_takes_no_less(heads: int, cache_bytes: int, head_dim: int) -> None:
    """Tables are noisy by two microseconds; beyond them a call reads all its rows, at most at a copy's rate."""
    for requests, rows in ((1, 100), (1, 5000), (3, 700), (16, 40000), (100, 4096), (200, 131072)):
        now = kernel_seconds(heads, head_dim, cache_bytes, requests, rows, H200)
        assert now > 20e-6
        for more in ((requests * 4, rows), (requests, rows * 4)):
            assert kernel_seconds(heads, head_dim, cache_bytes, *more, H200) > now - 2.5e-6
    rows, read = 131072, 2 * heads * head_dim * cache_bytes * 200 * 131072
    assert kernel_seconds(heads, head_dim, cache_bytes, 200, rows, H200) > 0.9 * read / 4.8e12


def test_only_our_plans_run_our_kernel() -> None:
    """Natively the runtime's kernel has a floor of 10 us; a pass of our plans has ours in each of its layers."""
    load = StepLoad(batch=1, num_draft_tokens=9, context=512)
    for name, low, high in ((ENGINE, 21e-6, 30e-6), (MOE, 10e-6, 12e-6)):
        model = model_of(name)
        seconds = {term.name: term.seconds for term in model.price("dflash", load).terms}
        assert low < seconds["attention, context"] / model.system.draft.num_layers < high
