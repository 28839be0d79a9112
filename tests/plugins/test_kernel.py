# SPDX-License-Identifier: Apache-2.0
"""The kernel's device source on the CPU: the emulator of tests/plugins/kernel runs it, float64 says what is right.

`make test` runs one head_dim and a case of each kind; `make test-full` all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.plugins.cases import CORNER, F16, FAR, FAR_PAGES, FEATURES, OUT_OF_RANGE, PAGED, PLANE, REGULAR, Case
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import A100, ADA, EmulationError, Gpu, build_kernel, check, once
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import BAD, draw

CASES = {case.name: case for case in (*REGULAR, *FEATURES, *CORNER, *PAGED)}
QUICK = {
    "empty-batch", "D64-bf16", "D64-bf16-fp8", "window7-causal-sinks", "N10-G5-S3", "N8-G1-S16", "around-the-window",
    "window-1", "window-largest", "window-in-block", "full-cache", "permuted-slots", "one-long", "sharp", "small",
    "sinks-no-context", "pages-16-V1-bf16", "pages-32-V2-fp8", "pages-64-V1-fp8", "pages-16-window-128", "pages-shared",
    "pages-many-rows", "D64-bias-fp8-output", "fp8-bias", "output-too-large",
}  # fmt: skip

# Three requests, of which a GPU of few CTAs cuts some and a GPU of many cuts all.
UNEVEN = Case(name="uneven", N=2, G=1, S=2, context_lengths=(700, 0, 300))
# Lengths so similar that each request is cut into the same number of parts; and more requests than a warp has lanes.
ALIKE = replace(UNEVEN, name="alike", context_lengths=(310, 290, 300))
MANY_ALIKE = replace(UNEVEN, name="many-alike", context_lengths=(70, 66, 90, 80) * 10)
MANY_UNEVEN = replace(UNEVEN, name="many-uneven", context_lengths=(70, 300, 0, 400) * 9)
# More requests than ranges: the second kernel then looks for cut requests at the ranges' boundaries.
MANY = Case(name="many", N=2, G=1, S=2, context_lengths=(200, 0, 129, 128, 513, 1, 260, 30, 0, 384, 7, 140))

Program = Callable[[Case], Path]


@pytest.fixture
def program() -> Program:
    """The emulated kernel of a head_dim, compiled when it is first asked for; FP16 doubles the time that takes."""

    def get(case: Case) -> Path:
        formats = emulation.ALL_FORMATS if case.dtype is F16 else emulation.BF16_BLOCKS
        name = f"emulated_head_dim_{case.D}_formats_{formats}"
        return once(name, lambda path: build_kernel(path, case.D, formats=formats))

    return get


# An H200's CTAs, and so few that most ranges have several steps, which the emulator runs in a third of the time.
H200, FEW = 264, 24


@pytest.mark.parametrize(
    ("case", "ctas"),
    [
        *(pytest.param(CASES[name], FEW, id=name) for name in sorted(QUICK)),
        *(pytest.param(case, H200, id=f"{name}-H200", marks=pytest.mark.full) for name, case in CASES.items()),
    ],
)
def test_against_float64(case: Case, ctas: int, program: Program, tmp_path: Path) -> None:
    check(program(case), tmp_path / "call", case, ctas=ctas)


@pytest.mark.parametrize("case", [UNEVEN, ALIKE, MANY], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "ctas", [1, pytest.param(5, marks=pytest.mark.full), 12, pytest.param(H200, marks=pytest.mark.full)]
)
def test_a_gpu_of_any_size(ctas: int, case: Case, program: Program, tmp_path: Path) -> None:
    """However the context is cut into ranges, and however many requests a range cuts."""
    config = check(program(case), tmp_path / "call", case, ctas=ctas).config
    assert config is not None
    assert config.ranges == ctas


@pytest.mark.parametrize(
    "case", [pytest.param(MANY_ALIKE, marks=pytest.mark.full), MANY_UNEVEN], ids=lambda case: case.name
)
def test_more_requests_than_lanes(case: Case, program: Program, tmp_path: Path) -> None:
    check(program(case), tmp_path / "call", case)


def test_the_order_of_threads_ctas_and_grids_changes_no_bit(program: Program, tmp_path: Path) -> None:
    case = CASES["permuted-slots"]
    emulation.check_order(program(case), tmp_path, case, ctas=12, seeds=4)


def call_far(program: Path, directory: Path) -> None:
    """Raises AssertionError if the kernel reads elsewhere than beyond 4 GiB."""
    tensors = draw(PLANE)
    far = replace(tensors, slot_ids=torch.tensor(FAR.slot_of, dtype=torch.int32))
    check(program, directory, FAR, tensors=far, expected=expect(PLANE, tensors))


@pytest.mark.full
def test_a_cache_and_pages_beyond_32_bits(program: Program, tmp_path: Path) -> None:
    call_far(program(FAR), tmp_path / "call")
    check(program(FAR_PAGES), tmp_path / "pages", FAR_PAGES)


@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_request_out_of_range_is_nan_and_leaves_the_others_alone(
    name: str, value: int, case: Case, program: Program, tmp_path: Path
) -> None:
    emulation.check_out_of_range(program(case), tmp_path / "call", case, name, value, ctas=FEW)


# Other GPUs: 163 KB of shared memory per CTA, or FP8 caches without programmatic dependent launch.
OLDER = {
    "D64-bf16": A100, "D128-bf16": A100, "D256-bf16": A100, "D96-f16": A100, "window7-causal-sinks": A100,
    "N8-G1-S16": A100, "pages-16-V1-bf16": A100, "D64-bias-fp8-output": A100, "D64-bf16-fp8": ADA,
    "D128-bf16-fp8": ADA, "pages-32-V2-fp8": ADA,
}  # fmt: skip


def build_older(case: Case, gpu: Gpu) -> Path:
    return once(
        f"emulated_sm_{gpu.architecture}_head_dim_{case.D}",
        lambda path: build_kernel(path, case.D, formats=emulation.ALL_FORMATS, gpu=gpu),
    )


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(OLDER))
def test_gpus_without_dependent_launch(name: str, tmp_path: Path) -> None:
    case, gpu = CASES[name], OLDER[name]
    config = check(build_older(case, gpu), tmp_path / "call", case, ctas=FEW).config
    assert config is not None
    assert config.shared_bytes <= gpu.shared_bytes


@pytest.mark.full
def test_a_cta_of_163_kb_has_more_teams(tmp_path: Path) -> None:
    case = CASES["D64-bf16"]
    results = [
        check(build_older(case, gpu), tmp_path / str(gpu.architecture), case, ctas=FEW).config for gpu in (A100, ADA)
    ]
    teams = [config.teams for config in results if config is not None]
    assert teams == [4, 2]


@pytest.mark.full
def test_what_an_older_gpu_lacks_is_noticed(tmp_path: Path) -> None:
    """Code of SM 8.x is not started early, and that of 8.0 never with an FP8 cache."""
    with pytest.raises(EmulationError, match="converts E4M3 on sm_80"):
        check(build_older(CASES["D64-bf16-fp8"], A100), tmp_path / "fp8", CASES["D64-bf16-fp8"], ctas=FEW)
    early = build_kernel(tmp_path / "early", 64, formats=emulation.BF16_BLOCKS, gpu=replace(ADA, starts_early=True))
    with pytest.raises(EmulationError, match="before the grid before"):
        check(early, tmp_path / "call", CASES["D64-bf16"], ctas=FEW)


def test_e4m3_without_the_gpus_conversion(faults: Path) -> None:
    """Every 997th FP32 number, and those at and halfway between E4M3's: as the emulator converts."""
    assert emulation.run(faults, "e4m3") == "0 differ\n"


@pytest.fixture
def faults() -> Path:
    return once("faults", lambda path: emulation.build(path, [emulation.HERE / "faults.cpp", *emulation.emulator()]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two writers", "thread 1: races with thread 0: writes what that wrote at shared memory address 0"),
        ("read without a barrier", "thread 40: races with thread 0: reads what that wrote at"),
        ("write without a barrier", "thread 40: races with thread 0: writes what that reads at"),
        ("a barrier of the wrong threads", "thread 40: races with thread 0: reads what that wrote at"),
        ("a barrier for one warp of two", "waits for threads that never come"),
        ("two instructions in a warp", "is at ballot_sync, other lanes of its warp at shfl_sync"),
        ("a read before the copy is waited for", "reads shared memory address 0 while a copy into it is under way"),
        ("a copy read without a barrier", "thread 40: races with thread 0: reads what that wrote at"),
        ("a copy over what is read", "thread 40: races with thread 0: writes what that reads at"),
        ("a copy nobody waits for", "thread 0: ends with copies under way"),
        ("a misaligned copy", "misaligned copy to 8"),
        ("a misaligned load", "misaligned load"),
        ("beyond the shared memory", "shared memory address 256 of 256 bytes"),
    ],
)
def test_the_emulator_finds(faults: Path, name: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        emulation.run(faults, name)


@pytest.mark.full
def test_a_kernel_that_does_not_end_is_ended(faults: Path) -> None:
    with pytest.raises(EmulationError, match=r"faults.* to end within 1 s of CPU time, found that it runs on"):
        emulation.run(faults, "a loop without end", seconds=1)


def test_the_emulator_lets_right_code_pass(faults: Path) -> None:
    emulation.run(faults, "none")


def test_every_launch_config_fits_the_gpu() -> None:
    sources = [emulation.HERE / "every_launch_config.cpp", *emulation.launch_config()]
    program = once("every_launch_config", lambda path: emulation.build(path, sources))
    assert emulation.run(program) == ""
