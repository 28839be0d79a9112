# SPDX-License-Identifier: Apache-2.0
"""Kernels with one thing wrong on purpose: the emulator, or float64, has to notice each of them.

A mutant is the kernel's source with one line changed, built anew; hence only `make test-full` runs these.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.plugins.cases import Case
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import (
    AHEAD,
    ALL_FORMATS,
    BF16_BLOCKS,
    BF16_BLOCKS_FP8_CACHES,
    HOPPER,
    MMA,
    SHORT,
    EmulationError,
    Gpu,
    check,
)
from tests.plugins.mutants import (
    ALIKE,
    CALLS,
    CASE,
    CTAS,
    FUSED,
    GUARD_MUTANTS,
    MANY,
    NARROW,
    PAGED,
    Mutant,
)
from tests.plugins.test_guards import MOST_SECONDS as MOST_SECONDS_OF_GUARDS
from tests.plugins.test_guards import SOURCES
from tests.plugins.test_guards import WGMMA as FEWEST_ROWS
from tests.plugins.test_kernel import call_far
from tests.plugins.test_short import WHOLE_SM

KERNEL = Path("kv_injection_attention") / "kernel"
MOST_SECONDS = 30  # seconds of CPU time: these calls take up to 5


def build(
    mutant: Mutant, directory: Path, kernel: int = MMA, formats: int = BF16_BLOCKS_FP8_CACHES,
    callers: Sequence[Path] = emulation.CALL,
) -> Path:  # fmt: skip
    plugins = directory / "plugins"
    shutil.copytree(emulation.PLUGINS, plugins)
    source = plugins / KERNEL / mutant.file
    source.write_text(mutant.planted(source.read_text()))
    return emulation.build_kernel(
        directory / "mutant", CASE.D, kernel, plugins=plugins, formats=formats, gpu=gpu_of(kernel), callers=callers
    )


def test_every_fault_can_be_planted() -> None:
    """In `make test`, too: a change of the kernel moves the lines that faults replace."""
    for mutant in (*GUARD_MUTANTS, NARROW, *(mutant for mutant, *_ in CALLS)):
        assert mutant.planted((emulation.PLUGINS / KERNEL / mutant.file).read_text())


def gpu_of(kernel: int) -> Gpu:
    return WHOLE_SM if kernel == SHORT else HOPPER


def suffix(kernel: int) -> str:
    return "-short" if kernel == SHORT else "-ahead" if kernel > AHEAD else ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "case", "ctas", "kernel"),
    CALLS,
    ids=[
        f"{mutant.name}{'-fused' * case.bias}{'-sm_90a' * (kernel > 0)}{suffix(kernel)}"
        for mutant, case, _, kernel in CALLS
    ],
)
def test_is_noticed(mutant: Mutant, case: Case, ctas: int, kernel: int, tmp_path: Path) -> None:
    program = build(mutant, tmp_path, kernel)
    with pytest.raises(mutant.noticed_as(), match=mutant.notices or None):
        check(program, tmp_path / "call", case, ctas=ctas, rounded_queries=kernel > 0, seconds=MOST_SECONDS)


@pytest.mark.full
@pytest.mark.parametrize("kernel", [MMA, FEWEST_ROWS])
@pytest.mark.parametrize("mutant", GUARD_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_guard_that_does_not_hold_is_noticed(mutant: Mutant, kernel: int, tmp_path: Path) -> None:
    program = build(mutant, tmp_path, kernel, BF16_BLOCKS, SOURCES)
    with pytest.raises(EmulationError):
        emulation.run(program, "1", "3000", seconds=MOST_SECONDS_OF_GUARDS)


@pytest.mark.full
def test_an_address_of_32_bits_is_noticed(tmp_path: Path) -> None:
    with pytest.raises((EmulationError, AssertionError)):
        call_far(build(NARROW, tmp_path, formats=ALL_FORMATS), tmp_path / "call")


@pytest.mark.full
@pytest.mark.parametrize("kernel", [MMA, 80, AHEAD + 80])
def test_the_kernel_as_it_is_passes(kernel: int, tmp_path: Path) -> None:
    program = emulation.build_kernel(tmp_path / "right", CASE.D, kernel, formats=BF16_BLOCKS_FP8_CACHES)
    few_rows = [] if kernel else [(MANY, 264)]  # unsupported by that kernel
    for case, ctas in ((CASE, CTAS), (PAGED, CTAS), (ALIKE, 12), (FUSED, CTAS), *few_rows):
        check(
            program,
            tmp_path / f"{case.name}-{case.pages}-{case.bias}-{ctas}",
            case,
            ctas=ctas,
            rounded_queries=kernel > 0,
        )
