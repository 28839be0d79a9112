# SPDX-License-Identifier: Apache-2.0
"""The attention of short contexts in the emulator.

A GPU's size is its SMs here: the fewer, the fewer teams a CTA has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plugins.cases import CORNER, FEATURES, MANY_ROWS_FP8, OUT_OF_RANGE, PAGED, REGULAR, Case
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import ADA, HOPPER, SHORT, Gpu, build_kernel, check, once
from tests.plugins.tensors import BAD
from tests.plugins.test_kernel import H200

pytestmark = pytest.mark.full

WHOLE_SM = replace(HOPPER, shared_bytes=227 << 10)
# It supports the longest contexts, too, but is never used for them, and the emulator would take minutes.
CASES = {
    case.name: case
    for case in (*REGULAR, *FEATURES, *CORNER, *PAGED, *MANY_ROWS_FP8)
    if case.D in (64, 128) and max(case.context_lengths, default=0) <= 5000
}


def program(case: Case, gpu: Gpu = WHOLE_SM) -> Path:
    name = f"short_head_dim_{case.D}_sm_{gpu.architecture}"
    return once(name, lambda path: build_kernel(path, case.D, SHORT, gpu=gpu))


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_against_float64(case: Case, tmp_path: Path) -> None:
    """An H200."""
    check(program(case), tmp_path / "call", case, ctas=H200 // 2)


@pytest.mark.parametrize(("sms", "teams"), [(132, 3), (8, 1)])
def test_a_gpu_of_any_size(sms: int, teams: int, tmp_path: Path) -> None:
    case = replace(CASES["gpt-oss-B1"], context_lengths=(300, 511))
    config = check(program(case), tmp_path / "call", case, ctas=sms).config
    assert config is not None
    assert (config.teams, config.row_groups, config.row_tiles) == (teams, 5, 1)


@pytest.mark.parametrize("name", ["D64-bf16", "D64-bf16-fp8", "D64-bias-fp8-output", "pages-16-V1-fp8"])
def test_a_gpu_without_dependent_launch(name: str, tmp_path: Path) -> None:
    check(program(CASES[name], ADA), tmp_path / "call", CASES[name], ctas=1)


@pytest.mark.parametrize("name", ["permuted-slots", "gpt-oss-fp8"])
def test_the_order_of_threads_and_ctas_changes_no_bit(name: str, tmp_path: Path) -> None:
    emulation.check_order(program(CASES[name]), tmp_path, CASES[name], ctas=12, seeds=4)


@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=lambda case: case.name)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_request_out_of_range_is_nan_and_leaves_the_others_alone(
    name: str, value: int, case: Case, tmp_path: Path
) -> None:
    emulation.check_out_of_range(program(case), tmp_path / "call", case, name, value, ctas=H200 // 2)
