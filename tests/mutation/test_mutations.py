# SPDX-License-Identifier: Apache-2.0
"""Damaged input of every reader: facts or our own error, within 5 s and 500 MB, and never a traceback.

The seeds are fixed; `make test-full` tries 10,000 for each.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.inputs import write_inputs
from tests.mutation.readers import READERS
from tests.paths import REPOSITORY


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mutation")
    write_inputs(directory)
    return directory


def mutate(name: str, count: int, inputs: Path, tmp_path: Path) -> str:
    own = shutil.copytree(inputs, tmp_path / "inputs")
    for file in (own / "deployment.yaml", own / "serve.yaml"):
        file.write_text(file.read_text().replace(str(inputs), str(own)))
    process = [sys.executable, "-m", "tests.mutation", name, str(count), str(own)]
    result = subprocess.run(process, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-6000:]}"
    return result.stdout


@pytest.mark.parametrize("name", READERS)
def test_100_mutations(name: str, inputs: Path, tmp_path: Path) -> None:
    assert f"{name}: 100 mutations" in mutate(name, 100, inputs, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_10_000_mutations(name: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = mutate(name, 10_000, inputs, tmp_path)
    with capsys.disabled():
        print(said, end="")
