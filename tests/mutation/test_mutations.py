# SPDX-License-Identifier: Apache-2.0
"""Damaged input of every reader: facts or our own error, within 5 s and 500 MB, and never a traceback.

The seeds are fixed; `make test-full` tries 10,000 for each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.inputs import write_inputs
from tests.mutation.readers import READERS
from tests.paths import REPOSITORY


def mutate(count: int, directory: Path, *names: str) -> str:
    write_inputs(directory)
    process = [sys.executable, "-m", "tests.mutation", str(count), str(directory), *names]
    result = subprocess.run(process, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-6000:]}"
    return result.stdout


def test_30_mutations(tmp_path: Path) -> None:
    assert mutate(30, tmp_path, *READERS).count(": 30 mutations, ") == len(READERS)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_10_000_mutations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = mutate(10_000, tmp_path, name)
    with capsys.disabled():
        print(said, end="")
