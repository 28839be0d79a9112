# SPDX-License-Identifier: Apache-2.0
"""cibuildwheel reads what pyproject.toml says of wheels, without building one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY


def build_identifiers(package: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("cibuildwheel", path=path)
    if program is None:
        pytest.skip("no cibuildwheel: pip install 'dflash-trt[dev]'")
    command = [program, "--print-build-identifiers", "--platform", "linux", str(package)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.full
def test_cibuildwheel_would_build_each_python_for_each_processor() -> None:
    result = build_identifiers(REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == sorted(
        f"cp3{minor}-manylinux_{processor}" for minor in (11, 12, 13, 14) for processor in ("x86_64", "aarch64")
    )


@pytest.mark.full
def test_cibuildwheel_refuses_a_key_that_is_not_its_own(tmp_path: Path) -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace("repair-wheel-command", "repair-command"))
    result = build_identifiers(tmp_path)
    assert result.returncode != 0
    assert "repair-command" in result.stderr
