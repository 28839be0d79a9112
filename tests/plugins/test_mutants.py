# SPDX-License-Identifier: Apache-2.0
"""Kernels with one thing wrong on purpose: the emulator, or float64, has to notice each of them.

A mutant is the kernel's source with one line changed, built anew; hence only `make test-full` runs these.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugins.cases import FP8, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import EmulationError
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw
from tests.plugins.test_kernel import call_far

# Two teams of three warps, of which the last has one tile of rows; ranges cut two of the three requests.
CASE = Case(name="mutated", N=8, G=1, S=10, cache_dtype=FP8, k_scale=0.02, v_scale=0.03, norm=4.0, sinks=True,
            context_lengths=(1700, 3, 300))  # fmt: skip
CTAS = 5
WAIT = "wait_for_previous_grid();  // all that is read may be its: the block, slots and lengths, rows just appended"
SCHEDULE = "const Schedule schedule(p, plan);"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    right: str
    wrong: str
    notices: str = ""  # the emulator's words; none: float64 notices


MUTANTS = [
    Mutant("no wait for copies", "stream.cuh", "wait_copies<kStages - 2>();", "", "while a copy into it is under way"),
    Mutant("a wait for one step too few", "stream.cuh", "wait_copies<kStages - 2>", "wait_copies<kStages - 1>",
           "while a copy into it is under way"),
    Mutant("no barrier after the wait", "stream.cuh", "group_sync(1 + worker_.team, team_threads(plan_));", "",
           "shared memory address|races with thread"),
    Mutant("one barrier for all teams", "stream.cuh", "group_sync(1 + worker_.team,", "group_sync(1,",
           "races with thread|while a copy"),
    Mutant("no barrier between segments", "attention.cuh", "cta_sync();  // shared memory is free", "//",
           "races with thread|while a copy"),
    Mutant("no wait for the attention grid", "combine.cuh", "wait_for_previous_grid();", ""),
    Mutant("no wait for the kernel before", "attention.cuh", "wait_for_previous_grid();", "", "before the grid before"),
    Mutant("a wait behind a read", "attention.cuh", f"{WAIT}\n  {SCHEDULE}", f"{SCHEDULE}\n  {WAIT}"),
    Mutant("rows beyond the segment", "stream.cuh", "copy_async(at, k, left > 0);", "copy_async(at, k, true);",
           "AddressSanitizer"),
    Mutant("no mask at the end", "attention.cuh", "end < kMatrixKeys ||", ""),
    Mutant("a maximum that never moves", "state.cuh", "if (any_lane(exceeds)) return false;", "any_lane(exceeds);"),
    Mutant("a sum left behind", "state.cuh", "sum[t][half] *= by;", ""),
    Mutant("the block's keys scaled", "attention.cuh", "1 / p_.k_scale)", "1.0f)"),
    Mutant("a range too long", "schedule.cuh", "min(length, all.begin + end * kUnitKeys)", "length"),
]  # fmt: skip


def build(mutant: Mutant, directory: Path) -> Path:
    plugins = directory / "plugins"
    shutil.copytree(emulation.PLUGINS, plugins)
    source = plugins / "kv_injection_attention" / "kernel" / mutant.file
    text = source.read_text()
    assert text.count(mutant.right) == 1, mutant.right
    source.write_text(text.replace(mutant.right, mutant.wrong))
    return emulation.build_kernel(directory / "mutant", CASE.D, plugins=plugins)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    program, tensors = build(mutant, tmp_path), draw(CASE)
    with pytest.raises(EmulationError if mutant.notices else AssertionError, match=mutant.notices or None):
        assert_close(emulation.call(program, tmp_path / "call", CASE, tensors, ctas=CTAS).out, *expect(CASE, tensors))


@pytest.mark.full
def test_an_offset_of_32_bits_is_noticed(tmp_path: Path) -> None:
    narrow = Mutant("narrow", "stream.cuh", "int64_t from_;", "int32_t from_;")
    with pytest.raises((EmulationError, AssertionError)):
        call_far(build(narrow, tmp_path), tmp_path / "call")


@pytest.mark.full
def test_the_kernel_as_it_is_passes(tmp_path: Path) -> None:
    program, tensors = emulation.build_kernel(tmp_path / "right", CASE.D), draw(CASE)
    assert_close(emulation.call(program, tmp_path / "call", CASE, tensors, ctas=CTAS).out, *expect(CASE, tensors))
