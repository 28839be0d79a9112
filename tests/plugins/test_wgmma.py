# SPDX-License-Identifier: Apache-2.0
"""The attention of sm_90a in the emulator, and the emulator's wgmma, on layouts worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.plugins import cases
from tests.plugins.cases import FP8, GPT_OSS_FP8, OUT_OF_RANGE, Case, Pages, ahead_fits, wgmma_rows
from tests.plugins.compare import assert_close
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import AHEAD, BF16_BLOCKS_FP8_CACHES, EmulationError, build_kernel, check, once
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import BAD, draw
from tests.plugins.test_kernel import call_far

EVERY = (*cases.MANY_ROWS_FP8, *cases.REGULAR, *cases.FEATURES, *cases.CORNER, *cases.PAGED)
CASES = [case for case in EVERY if wgmma_rows(case)]
Program = Callable[[Case], Path]


@pytest.fixture(params=[0, AHEAD], ids=["", "ahead"])
def program(request: pytest.FixtureRequest) -> Program:
    """The emulated kernel for a case, compiled when it is first asked for."""

    def get(case: Case) -> Path:
        if request.param == AHEAD and not (ahead_fits(case) and case.dtype is cases.BF16):
            pytest.skip("products ahead are for FP8 caches and many rows, and emulated for blocks of BF16")
        kernel = request.param + wgmma_rows(case)
        formats = BF16_BLOCKS_FP8_CACHES if request.param == AHEAD else emulation.ALL_FORMATS
        name = f"wgmma_head_dim_{case.D}_kernel_{kernel}"
        return once(name, lambda path: build_kernel(path, case.D, kernel, formats=formats))

    return get


# A range with more steps than the pipeline has stages, for each of the three teams; and a request that ranges cut.
QUICK = Case(name="quick", N=4, G=1, S=8, norm=4.0, sinks=True, context_lengths=(1100, 3, 60), slot_ids=(2, 0, 1))


@pytest.mark.parametrize(
    "case",
    [
        QUICK,
        replace(QUICK, cache_dtype=FP8, k_scale=0.02, v_scale=0.03),
        replace(QUICK, L=2, layer=1, window=900, pages=Pages(16, "V1")),
        replace(QUICK, L=2, layer=1, pages=Pages(64), cache_dtype=FP8, k_scale=0.02, v_scale=0.03),
        replace(QUICK, bias=True, output_scale=0.011),
    ],
    ids=("bf16", "fp8", "bf16-pages", "fp8-pages", "bias-fp8-output"),
)
def test_one_case_of_each_cache(case: Case, tmp_path: Path) -> None:
    """Cases of this kernel that `make test` runs."""
    assert case.dtype is cases.BF16
    program = once("wgmma_quick", lambda path: build_kernel(path, 64, 32, formats=emulation.BF16_BLOCKS))
    check(program, tmp_path / "call", case, ctas=2, rounded_queries=True)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: Case, program: Program, tmp_path: Path) -> None:
    check(program(case), tmp_path / "call", case, ctas=132, rounded_queries=True)


@pytest.mark.full
@pytest.mark.parametrize("ctas", [1, 2, 3, 5, 8])
def test_a_gpu_of_any_size(ctas: int, program: Program, tmp_path: Path) -> None:
    """However the context is cut into ranges, and however many requests a range cuts: with 3 CTAs and more, one."""
    case = replace(GPT_OSS_FP8, context_lengths=(2500, 3, 130))  # long enough for cutting to be worth it
    config = check(program(case), tmp_path / "call", case, ctas=ctas, rounded_queries=True).config
    assert config is not None
    assert config.ranges == ctas


@pytest.mark.full
def test_the_order_of_threads_changes_no_bit(program: Program, tmp_path: Path) -> None:
    case = replace(GPT_OSS_FP8, context_lengths=(1700, 3, 130))  # ranges cut the first one
    emulation.check_order(program(case), tmp_path, case, ctas=5, seeds=4)


@pytest.mark.full
@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_request_out_of_range_is_nan_and_leaves_the_others_alone(
    name: str, value: int, case: Case, program: Program, tmp_path: Path
) -> None:
    emulation.check_out_of_range(program(case), tmp_path / "call", case, name, value, rounded_queries=True)


@pytest.mark.full
@pytest.mark.parametrize("row", [64, 71, 72, 127])
def test_a_nan_key_reaches_every_query_that_sees_it(row: int, program: Program, tmp_path: Path) -> None:
    """Even queries whose exponential is a polynomial, which clamps; and the step with it ends."""
    case = replace(GPT_OSS_FP8, context_lengths=(150, 90), sinks=False)
    tensors = draw(case)
    tensors.k_cache[0, 0, row, 0, 5] = torch.nan
    out = emulation.call(program(case), tmp_path / "call", case, tensors, ctas=2).out
    assert out[0].isnan().all()
    expected = expect(case, draw(case), rounded_queries=True)
    assert_close(out[1], expected.output[1], expected.tolerance[1])


def test_the_polynomial_is_as_near_to_2_to_the_x_as_it_says(faults: Path) -> None:
    """Error for every 256th FP32 number from -126 to 9, relative to the power of 2 itself; clamped beyond."""
    worst, *clamped = map(float, emulation.run(faults, "exp2").split())
    assert 0.9e-4 < worst < 1.1e-4
    assert clamped == [0.0, 0.0, 0.0, 0.0, 512.0, 512.0, 512.0]  # -127, -128, -inf, NaN; 9, 1e30, inf


@pytest.mark.full
def test_a_cache_beyond_32_bits(program: Program, tmp_path: Path) -> None:
    call_far(program(cases.FAR), tmp_path / "call")


@pytest.fixture
def faults() -> Path:
    sources = [emulation.HERE / "wgmma_faults.cpp", *emulation.emulator()]
    return once("wgmma_faults", lambda path: emulation.build(path, sources))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing written", "a product reads shared memory address 0, which nobody wrote"),
        ("no proxy fence", "a product reads shared memory address 0, which thread 0 wrote without a proxy fence"),
        ("a proxy fence before the write", "which thread 0 wrote without a proxy fence"),
        ("a proxy fence of the reader", "thread 1 wrote without a proxy fence"),
        ("no barrier", "races with thread .*: a product reads what that wrote at|without a proxy fence|nobody wrote"),
        ("no wgmma.fence", "a product without a wgmma.fence since registers were touched"),
        ("a register loaded behind wgmma.fence", "a product without a wgmma.fence since registers were touched"),
        ("sums changed", "sums of a product under way were changed"),
        ("sums read", "sums are NaN"),
        ("a left operand changed", "registers that a product under way reads were changed"),
        ("a write while a product reads", "writes shared memory address 0 while a product reads it"),
        ("a write that no barrier orders behind the product",
         "thread 128: (races with thread .*: writes what that reads|writes shared memory address 0 while a product)"),
        ("a product nobody waits for", "ends with products under way"),
        ("two descriptors", "threads of a warpgroup differ in a product's descriptor, shape or scale"),
        ("half a warpgroup", "waits for threads that never come"),
        ("a warp of no warpgroup", "is in no whole warpgroup"),
        ("reserved bits", "reserved bits of a descriptor are set"),
        ("a base offset", "a descriptor's base offset"),
        ("beyond the shared memory", "shared memory address 4096 of 4096 bytes"),
    ],
)  # fmt: skip
def test_the_emulator_finds(faults: Path, name: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        emulation.run(faults, name)


@pytest.mark.parametrize("name", ["none", "two products of the same sums"])
def test_the_emulator_lets_right_code_pass(faults: Path, name: str) -> None:
    emulation.run(faults, name)


# Figures 157, 159, 161 of the PTX ISA 9.2: which 16 bytes of a row stand at each place of the pattern, row after row.
# Without a swizzle there are one 16 bytes a row, and the next of the row lie a leading offset on.
PATTERNS = {
    1: ("01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"),
    2: ("0123", "0123", "1032", "1032", "2301", "2301", "3210", "3210"),
    3: ("01", "01", "01", "01", "10", "10", "10", "10"),
}


def addresses(mode: int, start: int, leading: int, stride: int) -> list[list[int]]:
    """[row n][column k] of 32 rows of 16 elements, in elements. A start inside a pattern counts in its first row."""
    table = []
    for n in range(32):
        if mode == 0:
            first = start + n // 8 * stride + n % 8 * 16
            table.append([first // 2 + k for k in range(8)] + [(first + leading) // 2 + k for k in range(8)])
            continue
        pattern = PATTERNS[mode][n % 8]
        width = 16 * len(pattern)
        row = start // 1024 * 1024 + n // 8 * stride + n % 8 * width
        chunks = [start % 1024 // 16, start % 1024 // 16 + 1]
        table.append([(row + 16 * pattern.index(str(chunk))) // 2 + k for chunk in chunks for k in range(8)])
    return table


@pytest.mark.parametrize(
    ("mode", "start", "leading", "stride"),
    [(1, 0, 16, 1024), (1, 32, 16, 1024), (1, 96, 16, 1024), (2, 0, 16, 512), (2, 32, 16, 1024), (3, 0, 16, 256),
     (0, 0, 128, 256), (0, 16, 2048, 128)],
)  # fmt: skip
def test_a_matrix_in_shared_memory(mode: int, start: int, leading: int, stride: int, faults: Path) -> None:
    descriptor = mode << 62 | stride >> 4 << 32 | leading >> 4 << 16 | start >> 4
    sums = {
        (int(thread), int(i)): float(value)
        for thread, i, value in (line.split() for line in emulation.run(faults, "layout", str(descriptor)).splitlines())
    }
    expected = addresses(mode, start, leading, stride)
    # Figure 149: (thread, sum): (row of the warp's 16, column).
    by_hand = {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (8, 0), (0, 3): (8, 1), (0, 4): (0, 8), (3, 0): (0, 6),
               (4, 0): (1, 0), (31, 3): (15, 7), (31, 15): (15, 31), (5, 6): (9, 10)}  # fmt: skip
    for (thread, i), (row, column) in by_hand.items():
        for warp in range(4):
            assert sums[32 * warp + thread, i] == (warp + 1) * expected[column][row]
    for (thread, i), value in sums.items():
        row, column = thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
        assert value == (thread // 32 + 1) * expected[column][row]


@pytest.mark.parametrize(
    ("mode", "start", "stride"), [(1, 0, 1024), (1, 96, 1024), (2, 0, 512), (2, 32, 512), (3, 0, 256)]
)
def test_a_matrix_of_bytes_in_shared_memory(mode: int, start: int, stride: int, faults: Path) -> None:
    """32 rows of 32 bytes: of a row's 16 bytes the places are those of eight elements of 16 bits."""
    descriptor = str(mode << 62 | stride >> 4 << 32 | 1 << 16 | start >> 4)
    sums: dict[tuple[int, int], float] = {}
    for digit in range(3):
        for line in emulation.run(faults, "layout8", descriptor, str(digit)).splitlines():
            thread, i, value = line.split()
            sums[int(thread), int(i)] = sums.get((int(thread), int(i)), 0) + float(value) * 16**digit
    expected = addresses(mode, start, 16, stride)
    # Figures 152 and 153: (thread, sum): (row of the warp's 16, column).
    by_hand = {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (8, 0), (0, 4): (0, 8), (3, 0): (0, 6), (31, 15): (15, 31)}
    for (thread, i), (row, column) in by_hand.items():
        for warp in range(4):
            k = row + warp // 2 * 16
            assert sums[32 * warp + thread, i] == (warp + 1) * (2 * expected[column][k // 2] + k % 2)
    for (thread, i), value in sums.items():
        row, column = thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
        k = row + thread // 64 * 16
        assert value == (thread // 32 + 1) * (2 * expected[column][k // 2] + k % 2)
