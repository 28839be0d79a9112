# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments end in an exception, never in a signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import REPOSITORY


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 30), *(pytest.param(seed, 1000, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_no_call_ends_in_a_signal(seed: int, rounds: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.cpp.fuzz_bindings", str(seed), str(rounds)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
