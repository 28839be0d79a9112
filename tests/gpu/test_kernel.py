# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel against the CPU reference and float64, and what a caller may rely on besides the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.gpu.launches import Launch, bits, moved
from tests.plugins import cases
from tests.plugins.cases import FAR, FAR_FP8, OUT_OF_RANGE, Case, ahead_fits, wgmma_rows
from tests.plugins.compare import assert_close, rounding
from tests.plugins.kernel.oracle import Expected
from tests.plugins.kernel.oracle import expect as expect_in_float64
from tests.plugins.tensors import BAD, UNTOUCHED, Guarded, Tensors, draw, out_of_range, reference
from tests.plugins.test_guards import INVALID, Node

pytestmark = pytest.mark.gpu

CASES = [*cases.REGULAR, *cases.FEATURES, *cases.CORNER, *cases.MANY_ROWS_FP8, *cases.PAGED, cases.FAR_PAGES]
LONG = [case for case in cases.PERFORMANCE if sum(case.context_lengths) <= 131072]
# One with a split context and one without; a sink and a window; 16-bit and FP8 caches.
SOME = [case for case in CASES if case.name in ("gpt-oss-B4", "odd", "fp8-everything", "one-long", "no-context")]


def named(case: Case) -> str:
    return case.name


def expect(case: Case, tensors: Tensors, kernel: str = "best") -> Expected:
    """Expected output of `kernel` on this GPU: the sm_90a kernel rounds queries for an FP8 cache's keys."""
    may = torch.cuda.get_device_capability() == (9, 0) and wgmma_rows(case) > 0
    takes = kernel in ("wgmma", "ahead") or (kernel == "best" and case.S * case.N // case.G > 32)
    return expect_in_float64(case, tensors, rounded_queries=may and takes)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_against_the_reference(case: Case) -> None:
    """The reference rounds no queries; if the kernel does, the difference is known to the last bit."""
    tensors = draw(case)
    expected = expect(case, tensors)
    changed = (expected.output - expect_in_float64(case, tensors).output).abs()
    tolerance = expected.tolerance + rounding(expected.output, case.dtype) + changed
    assert_close(Launch(case, moved(tensors, "cuda")).run(), reference(case, tensors), tolerance)


@pytest.mark.parametrize("kernel", ["mma", "short", "wgmma", "ahead"])
@pytest.mark.parametrize("case", [case for case in CASES if case.D in (64, 128)], ids=named)
def test_each_kernel_by_name(case: Case, kernel: str) -> None:
    """Whichever of them the GPU would take."""
    if kernel in ("wgmma", "ahead") and (torch.cuda.get_device_capability() != (9, 0) or not wgmma_rows(case)):
        pytest.skip("needs a GPU of compute capability 9.0, and rows that its kernel is compiled for")
    if kernel == "ahead" and not ahead_fits(case):
        pytest.skip("products ahead are for an FP8 cache and more than 32 rows")
    tensors = draw(case)
    assert_close(Launch(case, moved(tensors, "cuda"), kernel=kernel).run(), *expect(case, tensors, kernel))


def test_an_fp8_cache_is_refused_by_gpus_without_fp8() -> None:
    (case,) = (case for case in CASES if case.name == "fp8-everything")
    if torch.cuda.get_device_capability() >= (8, 9):
        pytest.skip("needs a GPU of compute capability 8.0 to 8.7")
    with pytest.raises(RuntimeError, match=r"8\.9 or newer for an FP8 cache"):
        Launch(case, draw(case, "cuda")).run()


@pytest.mark.parametrize("case", LONG, ids=named)
def test_long_contexts_against_float64(case: Case) -> None:
    """The reference would take minutes."""
    tensors = draw(case, "cuda")
    assert_close(Launch(case, tensors).run(), *expect(case, tensors))


@pytest.mark.parametrize("case", [FAR, FAR_FP8], ids=named)
def test_a_cache_beyond_4_gib(case: Case) -> None:
    """The plane that is read begins after the first 4 GiB of a cache of 6 GiB; the rest of the cache is NaN."""
    free, needed = torch.cuda.mem_get_info()[0], 2 * case.cache_nbytes + 2**30
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, found {free / 2**30:.0f}")
    alone = replace(case, L=1, layer=0, slots=1, slot_ids=(0,))
    tensors = draw(alone, "cuda")
    expected = expect(alone, tensors)
    begin = case.cache_nbytes - alone.cache_nbytes
    assert begin > 2**32

    def far(plane: torch.Tensor) -> torch.Tensor:
        cache = torch.full((case.cache_nbytes,), UNTOUCHED, dtype=torch.uint8, device="cuda")
        cache[begin:] = bits(plane).flatten()
        return cache.view(case.cache_dtype).view(case.cache_shape)

    slots = torch.tensor(case.slot_of, dtype=torch.int32, device="cuda")
    placed = replace(tensors, k_cache=far(tensors.k_cache), v_cache=far(tensors.v_cache), slot_ids=slots)
    assert_close(Launch(case, placed).run(), *expected)


@pytest.mark.parametrize("case", SOME, ids=named)
def test_inputs_are_left_as_they_were(case: Case) -> None:
    """The whole cache above all: other requests' slots, other layers, rows beyond the context."""
    tensors = draw(case, "cuda")
    before = moved(tensors, "cuda")
    Launch(case, tensors).run()
    for tensor, copy in zip(tensors.each(), before.each(), strict=True):
        assert torch.equal(bits(tensor), bits(copy))


@pytest.mark.parametrize(
    ("case", "kernel"),
    [*((case, "best") for case in SOME), *((case, "short") for case in SOME if case.D in (64, 128))],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
def test_every_run_gives_the_same_bits(case: Case, kernel: str) -> None:
    launch = Launch(case, draw(case, "cuda"), kernel=kernel)
    first = launch.run().clone()
    for _ in range(20):
        launch.out.fill_(torch.nan)
        assert torch.equal(bits(launch.run()), bits(first))


@pytest.mark.parametrize("case", SOME, ids=named)
def test_a_replayed_graph_gives_the_bits_of_a_launch(case: Case) -> None:
    """With other values, slots and context lengths in the same tensors than those it was captured with."""
    tensors = draw(case, "cuda")
    launch = Launch(case, tensors)
    direct = launch.run().clone()
    launch.out.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.start()
    torch.cuda.synchronize()
    assert launch.out.isnan().all()  # captured, not run
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(launch.out), bits(direct))

    other = replace(case, seed=1, context_lengths=case.context_lengths[::-1], slot_ids=case.slot_of[::-1])
    for tensor, values in zip(tensors.each(), draw(other, "cuda").each(), strict=True):
        tensor.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(launch.out), bits(Launch(other, tensors).run()))
    assert not torch.equal(bits(launch.out), bits(direct))


def test_two_plans_take_turns() -> None:
    """One kernel, launched with more and with less shared memory, directly and from graphs captured before."""
    cases = [Case(name=f"S{S}", S=S, N=8, G=1, context_lengths=(2000,)) for S in (1, 32)]
    launches = [Launch(case, draw(case, "cuda")) for case in cases]
    expected = [launch.run().clone() for launch in launches]
    graphs = [torch.cuda.CUDAGraph() for _ in cases]
    for graph, launch in zip(graphs, launches, strict=True):
        with torch.cuda.graph(graph):
            launch.start()
    for graph, launch, output in [*zip(graphs, launches, expected, strict=True)] * 2:
        launch.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(launch.out), bits(output))


# The output has as many elements as the cache, so that a call's context can be the previous call's values.
CHAIN = Case(name="chain", N=64, G=8, S=32, slot_ids=(0, 0, 0), context_lengths=(768, 300, 40))


def reading(tensors: Tensors, out: torch.Tensor) -> Tensors:
    """The inputs with the output of another call of CHAIN as the context's values."""
    return replace(tensors, v_cache=out.view(tensors.v_cache.shape))


def test_calls_follow_each_other_on_a_stream() -> None:
    """A call reads the output of the one before it, and overwrites the workspace that one had."""
    first = draw(CHAIN, "cuda")
    launch = Launch(CHAIN, first)
    second = reading(draw(replace(CHAIN, seed=1), "cuda"), launch.out)
    chained = Launch(CHAIN, second, launch.workspace)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        launch.start()
        chained.start()
    torch.cuda.synchronize()
    assert_close(launch.out, *expect(CHAIN, first))
    assert_close(chained.out, *expect(CHAIN, second))


def test_layers_in_a_graph_wait_for_each_other() -> None:
    """Each may start before the one in front has ended, whose output it reads and whose workspace it overwrites."""
    tensors = draw(CHAIN, "cuda")
    launches = [Launch(CHAIN, tensors)]
    for _ in range(7):
        launches.append(Launch(CHAIN, reading(tensors, launches[-1].out), launches[0].workspace))
    expected = [launch.run().clone() for launch in launches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.start()
    for _ in range(20):
        for launch in launches:
            launch.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for launch, output in zip(launches, expected, strict=True):
            assert torch.equal(bits(launch.out), bits(output))


def test_a_call_waits_for_the_kernel_in_front_of_it() -> None:
    """The preceding kernel writes all inputs: the block, the context's rows, slots and lengths."""
    case = Case(name="fresh", context_lengths=(2000, 300), slots=2)
    variants = [draw(replace(case, seed=seed, slot_ids=(seed % 2, 1 - seed % 2)), "cuda") for seed in range(4)]
    expected = [Launch(case, variant).run().clone() for variant in variants]
    tensors = moved(variants[0], "cuda")
    launch = Launch(case, tensors)
    for _ in range(5):
        for variant, output in zip(variants, expected, strict=True):
            for tensor, values in zip(tensors.each(), variant.each(), strict=True):
                tensor.copy_(values)
            launch.start()
            assert torch.equal(bits(launch.out), bits(output))


@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=named)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_request_out_of_range_is_nan_and_leaves_the_others_alone(name: str, value: int, case: Case) -> None:
    """The device's tensor has it; the values that the host is shown are those of the case."""
    tensors = draw(case, "cuda")
    out = Launch(case, out_of_range(tensors, name, value)).run()
    assert out[1].isnan().all()
    expected = expect(case, tensors)
    for b in (0, 2):
        assert_close(out[b], expected.output[b], expected.tolerance[b])


@pytest.mark.parametrize(("case", "change"), INVALID)
def test_invalid_pointers_or_layout_make_every_request_nan(case: Case, change: Callable[[Node], None]) -> None:
    launch = Launch(case, draw(case, "cuda"))
    change(launch.inputs)
    assert launch.run().isnan().all()


@pytest.mark.parametrize("value", [-1, 2**31 - 1])
@pytest.mark.parametrize("name", ["pages-16-V1-bf16", "pages-many-rows-fp8"])
def test_an_entry_that_leads_to_no_page_makes_its_request_nan(name: str, value: int) -> None:
    case = next(case for case in cases.PAGED if case.name == name)
    assert case.pages is not None
    launch = Launch(case, tensors := draw(case, "cuda"))
    launch.inputs["page_table"][case.slot_of[0], (case.context_lengths[0] - 1) // case.pages.size] = value
    out, expected = launch.run(), expect(case, tensors)
    assert out[0].isnan().all()
    for b in range(1, case.B):
        assert_close(out[b], expected.output[b], expected.tolerance[b])


REFUSED = Case(name="refused", slots=3, C_max=9, context_lengths=(9, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_ids": (0, 3)}, "request 1, slot id: expected 0 to 2, found 3"),
        ({"slot_ids": (-1, 0)}, "request 0, slot id: expected 0 to 2, found -1"),
        ({"context_lengths": (9, 131073)}, "request 1, context length: expected 0 to 131072, found 131073"),
        ({"D": 80}, "head_dim: expected 64, 96, 128 or 256, found 80"),
    ],
    ids=("slot", "negative-slot", "context", "head-dim"),
)
def test_the_host_refuses(change: dict[str, object], message: str) -> None:
    case = replace(REFUSED, **change)
    tensors = draw(replace(REFUSED, D=case.D), "cuda")
    with pytest.raises(ValueError, match=message):
        Launch(case, tensors).start()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    case = Case(name="split", context_lengths=(4096,))
    launch = Launch(case, draw(case, "cuda"), Guarded((16,), torch.uint8, "cuda"))
    with pytest.raises(ValueError, match=r"workspace: expected at least \d+ bytes, found 16"):
        launch.start()
