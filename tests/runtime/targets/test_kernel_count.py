# SPDX-License-Identifier: Apache-2.0
"""Kernels of a layer in a recorded pass on a GPU, counted without one, and what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3 import modeling_qwen3

from dflash_trt.engine import fused
from dflash_trt.engine.plans.launcher import EagerLauncher
from dflash_trt.runtime.kvcache.paged_caches import SlotCache
from dflash_trt.runtime.targets.fused_layers import fuse_layers, gelu_gated, replace_norms, silu_gated, torch_norm
from dflash_trt.runtime.targets.packed_pass import _gathered, _softmax, _write
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, PackedTarget
from dflash_trt.runtime.targets.recorded_pass import PassSize, StaticPass
from dflash_trt.runtime.targets.target import Segment
from tests.contract.cuda_graphs import tensors_of
from tests.runtime.drafter.torch.inductor import compile_kernels, written
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

TWO = {"apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"}
"""Compiled functions of two kernels, for q and k; all others are one."""


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
    monkeypatch.setattr(fused, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(fused, "why_not_compiled", lambda: None)


def kernels(name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernels of a recorded pass of two requests with four tokens each, in BF16."""
    model_type, settings = PACKED[name]
    model = random_model(model_type, **{**settings, "num_hidden_layers": num_layers}).bfloat16()
    replace_norms(model, torch_norm)
    fuse_layers(model)
    counting, meta = Counting(), torch.device("meta")

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            count = counting.count
            results = function(*args, **keywords)
            counting.count = count + (2 if function.__name__ in TWO else 1)
            return results

        return call

    monkeypatch.setattr(fused, "compiled", compiled)
    target = PackedTarget(model, TAPS[:1], NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
    model.to(meta)  # where torch decomposes no operator that is one kernel on a GPU
    for norm in (module for module in model.modules() if getattr(module, "forward", None).__class__ is partial):
        norm.forward = partial(norm.forward.func, *(tree_map_only(Tensor, lambda x: x.to(meta), norm.forward.args)))
    target._device, cache = meta, SlotCache(NUM_SLOTS, meta)
    segments = [Segment(slot=slot, token_ids=[5] * 4, num_logits=4) for slot in range(2)]
    for segment in segments:
        cache.table.cover(segment.slot, 4)
    current = StaticPass(PassSize.of(segments, cache.table), cache, meta)
    with torch.inference_mode():
        target._run_static(current, True)  # makes the caches
        counting.count = 0
        with counting:
            target._run_static(current, True)
    return counting.count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "expected"), [("qwen3", 21), ("gpt_oss", 39)])
def test_kernels_of_a_layer(name: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused: 32 and 63; a family whose functions are no longer found has more than expected."""
    fewer, more = (kernels(name, num_layers, monkeypatch) for num_layers in (3, 4))
    assert more - fewer == expected


@pytest.mark.usefixtures("gpu")
def test_what_does_not_compile_runs_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(fused, "compiled", partial(torch.compile, backend=backend))
    monkeypatch.setattr(fused, "FAILED", set())
    gate, up = torch.randn(2, 4, 8)
    for _ in range(2):
        assert torch.equal(silu_gated(gate, up), torch.nn.functional.silu(gate) * up)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "torch.compile made no kernel of silu_gated, so passes take longer" in record.message
    assert "no such GPU" in record.message


@pytest.mark.full
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "gemma4"])
def test_later_sizes_and_layers_share_what_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch traces; what it would compile runs as it was traced."""
    made = Counter[str]()

    @cache
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            made[function.__name__] += 1
            return graph.forward

        return torch.compile(function, backend=backend)

    monkeypatch.setattr(fused, "compiled", compiled)
    torch._dynamo.reset()
    model_type, settings = PACKED[name]
    layers = {"num_hidden_layers": 10} | ({"layer_types": ALTERNATING[:2] * 5} if "layer_types" in settings else {})
    model = random_model(model_type, **settings | layers).bfloat16()
    fuse_layers(model)
    target = PackedTarget(model, (0,), NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())

    def decode(num_segments: int, num_tokens: int) -> int:
        segments = [Segment(slot=i, token_ids=[5] * num_tokens, num_logits=num_tokens) for i in range(num_segments)]
        target.verify(segments, with_taps=True)
        return sum(made.values())

    for size in ((1, 1), (1, 4), (2, 1), (2, 4)):
        compiled_by_now = decode(*size)
    assert max(made.values()) <= 8, made
    assert decode(4, 2) == decode(4, 8) == decode(3, 16) == compiled_by_now, made


def heads(num_heads: int, rows: int, dim: int = 64) -> Tensor:
    """[1, N, R, D], as a product makes it: rows outside."""
    return torch.randn(1, rows, num_heads, dim).transpose(1, 2)


def rotary(rows: int, dim: int = 64) -> list[Any]:
    return [heads(8, rows), heads(2, rows), torch.randn(1, rows, dim), torch.randn(1, rows, dim)]


def caches(rows: int) -> list[Any]:
    return [
        torch.randn(2, 256, 64),
        torch.randn(2, 256, 64),
        torch.arange(rows) * 7,
        heads(2, rows)[0],
        heads(2, rows)[0],
    ]


def scores(rows: int) -> list[Any]:
    visible = torch.rand(1, 2, 4 * rows, 64) > 0.5
    visible[..., :33] = False
    visible[..., 40] = True
    return [torch.randn(2, 2, 4 * rows, 64), torch.zeros(visible.shape).masked_fill(~visible, -torch.inf), 0.125, None]


class GptOss(NamedTuple):
    alpha: float = 1.702
    limit: float = 1.5


def gpt_oss_gate(x: Tensor) -> Tensor:
    return modeling_gpt_oss.GptOssExperts._apply_gate(GptOss(), x)  # type: ignore[arg-type,no-any-return]


CASES: dict[str, tuple[Any, Callable[[int], list[Any]]]] = {
    "rotary": (modeling_qwen3.apply_rotary_pos_emb, rotary),
    "rotary of gpt-oss": (modeling_gpt_oss.apply_rotary_pos_emb, lambda rows: rotary(rows, 32)),
    "interleaved": (modeling_deepseek_v3.apply_rotary_pos_emb_interleave, rotary),
    "silu": (silu_gated, lambda rows: [torch.randn(1, rows, 96), torch.randn(1, rows, 96)]),
    "gelu": (gelu_gated, lambda rows: [torch.randn(1, rows, 96), torch.randn(1, rows, 96)]),
    "experts of gpt-oss": (gpt_oss_gate, lambda rows: [2 * torch.randn(rows, 96)]),
    "write": (_write, caches),
    "gather": (_gathered, lambda rows: [torch.randn(2, 9, 32, 64), torch.randn(2, 9, 32, 64), torch.arange(rows)]),
    "sinks": (_softmax, lambda rows: [*scores(rows), None, torch.randn(8)]),
    "softcap": (_softmax, lambda rows: [*scores(rows), 2.0, None]),
}


def cast(values: list[Any], dtype: torch.dtype) -> list[Any]:
    """Copies that lie in memory alike."""
    is_float = [isinstance(value, Tensor) and value.is_floating_point() for value in values]
    return [value.clone().to(dtype) if wanted else value for value, wanted in zip(values, is_float, strict=True)]


def plain(function: Any) -> Callable[..., Any]:
    """The function without torch.compile."""
    return function.function if isinstance(function, fused.Fused) else function  # type: ignore[no-any-return]


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_inductor_makes_as_many_kernels_and_triton_compiles_them(name: str, tmp_path: Path) -> None:
    """For an H100."""
    function, make = CASES[name]
    values = cast(make(4), torch.bfloat16)
    given = [value for value in values if isinstance(value, Tensor)]

    class Module(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            rest = iter(tensors)
            return plain(function)(*(next(rest) if isinstance(value, Tensor) else value for value in values))

    code = written(Module(), given)
    expected = 2 if plain(function).__name__ in TWO else 1
    assert code.count(".run(") == expected
    assert compile_kernels(code, (9, 0), tmp_path) == expected


@pytest.mark.full
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_round_once(name: str) -> None:
    """Against the same formula in FP64: BF16 within half a unit of the last place, FP32 within a few of its own.

    Inductor's code for a CPU; the second call is compiled for any number of rows.
    """
    function, make = CASES[name]
    compiled = function if isinstance(function, fused.Fused) else fused.Fused(function)
    for rows, dtype, bound in ((4, torch.bfloat16, 2**-8), (6, torch.float32, 2**-18)):
        values = cast(make(rows), dtype)
        exact = cast(values, torch.float64)
        with torch.inference_mode():
            found, expected = compiled(*values), plain(function)(*exact)
        pairs = zip(tensors_of((found, values[:2])), tensors_of((expected, exact[:2])), strict=True)
        for ours, theirs in pairs:  # the first two are written in place, or read
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=2**-18)


@pytest.mark.full
@pytest.mark.usefixtures("gpu")
def test_a_compiled_pass_is_the_models_own() -> None:
    """By Inductor's code for a CPU, in a thread as the decoder's: experts, sinks, windows, and pages that grow."""
    model, turns = family_model("gpt_oss"), random_history(seed=3, num_turns=8, longest=20)
    with mock.patch.object(fused, "on_gpu", return_value=False):
        expected = recomputed(model, turns)
    fuse_layers(model)
    traced = counters["stats"]["unique_graphs"]
    with ThreadPoolExecutor(1) as threads:
        target = PackedTarget(model, TAPS, NUM_SLOTS, TORCH_OPERATORS, EagerLauncher())
        found = threads.submit(computed, target, turns).result()
    assert relative_error(found, expected) < 1e-4
    assert counters["stats"]["unique_graphs"] > traced + 5
