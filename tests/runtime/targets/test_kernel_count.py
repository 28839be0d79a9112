# SPDX-License-Identifier: Apache-2.0
"""Kernels of a layer in a recorded pass on a GPU, counted without one, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.device import fused
from dflash_trt.device.launcher import EagerLauncher
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets.compiled_layers import compile_layers
from dflash_trt.runtime.targets.packed_pass import _gathered, _softmax, _write
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, PackedTarget
from dflash_trt.runtime.targets.recorded_pass import PassSize, StaticPass
from dflash_trt.runtime.targets.target import Segment
from tests.contract.cuda_graphs import tensors_of
from tests.runtime.drafter.torch.inductor import (
    compile_as_on_gpu,
    compile_kernels,
    num_kernels,
    written,
    written_as_traced,
)
from tests.runtime.targets.families import (
    ALTERNATING,
    NUM_SLOTS,
    PACKED,
    TAPS,
    computed,
    family_model,
    random_history,
    random_model,
    recomputed,
    relative_error,
)

pytestmark = pytest.mark.full

FUNCTIONS = (_gathered, _softmax, _write)
"""Compiled parts of attention: one kernel each."""
COMPILED = fused.compiled
Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


class Counting(TorchDispatchMode):
    """Counts operators that compute: torch launches a kernel for each at least."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        read = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
        makes = any(tensor.untyped_storage()._cdata not in read for tensor in tensors_of(results))
        writes = any(given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments)
        self.count += (makes or writes) and not func._schema.name.startswith("aten::empty")
        return results


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose CPU is taken for a GPU by what torch.compile is asked for."""
    compile_as_on_gpu(monkeypatch)
    for function in FUNCTIONS:
        monkeypatch.setattr(function, "_compiled", None)
    torch._dynamo.reset()


def compile_by(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled by `backend`; what attention has compiled runs as it is written."""

    def compiled_by(function: Callable[..., Any]) -> Callable[..., Any]:
        is_written = function in (each.function for each in FUNCTIONS)
        return function if is_written else COMPILED(function, backend=backend)

    monkeypatch.setattr(fused, "compiled", compiled_by)


def packed(name: str, **settings: Any) -> PackedTarget:
    """A target in BF16, of compiled layers."""
    model_type, own = PACKED[name]
    model = random_model(model_type, **own | settings).bfloat16()
    with mock.patch.object(fused, "on_gpu", return_value=False):
        target = PackedTarget(model, TAPS[:1], NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    compile_layers(model)
    return target


def decode(target: PackedTarget, num_segments: int, num_tokens: int) -> None:
    segments = [Segment(slot=i, token_ids=[5] * num_tokens, num_logits=num_tokens) for i in range(num_segments)]
    target.verify(segments, with_taps=True)


def kernels(name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernels of a recorded pass of two requests with four tokens each, in BF16."""
    counting, attend, cpu = Counting(), StaticPass.attend, torch.device("cpu")

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        found: list[int] = []

        def run(*inputs: Tensor) -> Any:
            if not found:
                found.append(num_kernels(graph, inputs))
            counting.count += found[0]
            return graph.forward(*inputs)

        return run

    def counted_attend(self: StaticPass, *args: Any) -> Tensor:
        with counting:
            return attend(self, *args)

    def one_kernel(function: Callable[..., Any], *args: Any) -> Any:
        count = counting.count
        results = function(*args)
        counting.count = count + 1
        return results

    compile_by(backend, monkeypatch)
    for function in FUNCTIONS:
        monkeypatch.setattr(function, "_compiled", partial(one_kernel, function.function))
    monkeypatch.setattr(StaticPass, "attend", counted_attend)
    target = packed(name, num_hidden_layers=num_layers)
    cache = SlotCache(NUM_SLOTS, cpu)
    segments = [Segment(slot=slot, token_ids=[5] * 4, num_logits=4) for slot in range(2)]
    for segment in segments:
        cache.table.cover(segment.slot, 4)
    current = StaticPass(PassSize.of(segments, cache.table), cache, cpu)
    target._run_static(current, True)  # makes the caches
    counting.count = 0
    target._run_static(current, True)
    return counting.count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "expected"), [("qwen3", 15), ("gpt_oss", 25)])
def test_kernels_of_a_layer(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's, for an H100, and attention's."""
    fewer, more = (kernels(name, num_layers, monkeypatch) for num_layers in (3, 4))
    assert more - fewer == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4-moe", "gpt_oss", "qwen3"])
def test_triton_compiles_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an H100: parts of layers, and attention's functions, for one row and for any."""
    counts: list[tuple[bool, int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        takes_any = any(isinstance(value, torch.SymInt) for value in inputs)
        counts.append((takes_any, compile_kernels(written_as_traced(graph), (9, 0), tmp_path)))
        return graph.forward

    model_type, own = PACKED[name]
    model = random_model(model_type, **own).bfloat16()
    monkeypatch.setattr(fused, "compiled", partial(COMPILED, backend=backend))
    compile_layers(model)
    target = PackedTarget(model, TAPS[:1], NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    for size in ((1, 1), (2, 4), (4, 8)):
        decode(target, *size)
    for takes_any in (False, True):
        assert sum(count for each, count in counts if each is takes_any) > 5


@pytest.mark.usefixtures("gpu")
def test_what_does_not_compile_runs_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once for all layers, after the first part of one has run."""
    model, turns = family_model("qwen3"), random_history(seed=1)
    expected = recomputed(model, turns)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        if any(node.target is torch.nn.functional.silu for node in graph.graph.nodes):
            raise RuntimeError("no such GPU")
        return graph.forward

    compile_by(backend, monkeypatch)
    target = PackedTarget(model, TAPS, NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    compile_layers(model)
    assert relative_error(computed(target, turns), expected) < 1e-4
    (record,) = (record for record in caplog.records if record.name == fused.LOG.name and record.levelname == "WARNING")
    assert "torch.compile made no kernel of Qwen3DecoderLayer.forward, so passes take longer" in record.message
    assert "no such GPU" in record.message


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", [name for name in PACKED if not name.startswith("qwen3_")] + ["qwen3_moe"])
def test_all_is_compiled_when_a_target_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later sizes, and further layers, run what was compiled for one row or for two."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def made(num_layers: int) -> int:
        graphs.clear()
        torch._dynamo.reset()
        model_type, own = PACKED[name]
        kinds = {"layer_types": ALTERNATING[:2] * (num_layers // 2)} if "layer_types" in own else {}
        model = random_model(model_type, **own | {"num_hidden_layers": num_layers, **kinds})
        compile_layers(model)
        target, count = PackedTarget(model, TAPS[:1], NUM_SLOTS, TORCH_OPERATORS, EagerLauncher()), len(graphs)
        for size in ((1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (4, 8), (3, 16)):
            decode(target, *size)
        assert len(graphs) == count
        return count

    compile_by(backend, monkeypatch)
    assert 10 < made(8) == made(10)


def caches(rows: int) -> list[Any]:
    key, value = (torch.randn(rows, 2, 64).transpose(0, 1) for _ in range(2))
    return [torch.randn(2, 256, 64), torch.randn(2, 256, 64), torch.arange(rows) * 7, key, value]


def scores(rows: int) -> list[Any]:
    visible = torch.rand(1, 2, 4 * rows, 64) > 0.5
    visible[..., :33] = False
    visible[..., 40] = True
    return [torch.randn(2, 2, 4 * rows, 64), torch.zeros(visible.shape).masked_fill(~visible, -torch.inf), 0.125, None]


CASES: dict[str, tuple[fused.Fused, Callable[[int], list[Any]]]] = {
    "write": (_write, caches),
    "gather": (_gathered, lambda rows: [torch.randn(2, 9, 32, 64), torch.randn(2, 9, 32, 64), torch.arange(rows)]),
    "sinks": (_softmax, lambda rows: [*scores(rows), None, torch.randn(8)]),
    "softcap": (_softmax, lambda rows: [*scores(rows), 2.0, None]),
}


def cast(values: list[Any], dtype: torch.dtype) -> list[Any]:
    """Copies that lie in memory alike."""
    is_float = [isinstance(value, Tensor) and value.is_floating_point() for value in values]
    return [value.clone().to(dtype) if wanted else value for value, wanted in zip(values, is_float, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_attentions_functions_are_one_kernel(name: str, tmp_path: Path) -> None:
    """Triton compiles it for an H100."""
    function, make = CASES[name]
    values = cast(make(4), torch.bfloat16)
    given = [value for value in values if isinstance(value, Tensor)]

    class Module(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            rest = iter(tensors)
            return function.function(*(next(rest) if isinstance(value, Tensor) else value for value in values))

    code = written(Module(), given)
    assert code.count(".run(") == compile_kernels(code, (9, 0), tmp_path) == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_round_once(name: str) -> None:
    """Against the same formula in FP64: BF16 within half a unit of the last place, FP32 within a few of its own.

    Inductor's code for a CPU; the second call is compiled for any number of rows.
    """
    function, make = CASES[name]
    for rows, dtype, bound in ((4, torch.bfloat16, 2**-8), (6, torch.float32, 2**-18)):
        values = cast(make(rows), dtype)
        exact = cast(values, torch.float64)
        with torch.inference_mode():
            found, expected = function(*values), function.function(*exact)
        pairs = zip(tensors_of((found, values[:2])), tensors_of((expected, exact[:2])), strict=True)
        for ours, theirs in pairs:  # the first two are written in place, or read
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=2**-18)


@pytest.mark.usefixtures("gpu")
def test_a_compiled_pass_is_the_models_own() -> None:
    """By Inductor's code for a CPU, in a thread as the decoder's: experts, sinks, windows, and pages that grow."""
    model, turns = family_model("gpt_oss"), random_history(seed=3, num_turns=8, longest=20)
    expected = recomputed(model, turns)
    compile_layers(model)
    with ThreadPoolExecutor(1) as threads:
        target = PackedTarget(model, TAPS, NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
        found = threads.submit(computed, target, turns).result()
    assert relative_error(found, expected) < 1e-4
    assert not fused.FAILED


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", PACKED)
def test_a_traced_pass_is_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of every family, run as they were traced."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model, turns = family_model(name), random_history(seed=2)
    expected = recomputed(model, turns)
    compile_by(backend, monkeypatch)
    compile_layers(model)
    target = PackedTarget(model, TAPS, NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    assert relative_error(computed(target, turns), expected) < 1e-4
    assert len(graphs) > 10
