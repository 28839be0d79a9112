# SPDX-License-Identifier: Apache-2.0
"""New users with the wheel in an empty environment: each script as it stands, in an empty folder, no checkout near."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dflash_trt import __version__
from dflash_trt.cli.version import commit
from tests.paths import FIXTURES, REPOSITORY

SCRIPTS = {
    "deploy": (),
    "own_draft": (FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-gpt-oss"),
    "compare": (FIXTURES / "bench-run",),
}


def run(*command: object, **options: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an environment has its programs, into which the wheel was installed, with `observe` from the index."""
    environment, wheels = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("wheels")
    without_kernels = "-Ccmake.define.DFLASH_CUDA=OFF"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", without_kernels, "--wheel-dir", wheels, REPOSITORY)
    venv.create(environment, with_pip=True)
    wheel = next(wheels.glob(f"dflash_trt-{__version__}-*.whl"))
    run(environment / "bin" / "pip", "install", f"{wheel}[observe]", cwd=wheels)
    return environment / "bin"


def alone(programs: Path, folder: Path, *command: object) -> str:
    """What a program of the environment prints, where nothing leads to the checkout."""
    return run("env", "-i", f"PATH={programs}:/usr/bin:/bin", f"HOME={folder}", *command, cwd=folder)


@pytest.mark.full
def test_the_wheel_says_its_commit(programs: Path, tmp_path: Path) -> None:
    recorded = os.environ.get("DFLASH_COMMIT") or commit()
    lines = alone(programs, tmp_path, "dflash-trt", "--version").splitlines()
    assert lines[:2] == [f"dflash-trt, version {__version__}", f"commit: {recorded}"]
    assert lines[2].startswith("kernels: none: built without nvcc")
    place = alone(programs, tmp_path, "python", "-c", "import dflash_trt; print(dflash_trt.__file__)")
    assert Path(place.strip()).is_relative_to(programs.parent)


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, programs: Path, tmp_path: Path) -> None:
    alone(programs, tmp_path, "bash", REPOSITORY / "tests" / "installed" / f"{name}.sh", *SCRIPTS[name])
