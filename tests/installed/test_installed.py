# SPDX-License-Identifier: Apache-2.0
"""New users with the wheel in an empty environment and no checkout near, by scripts."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from dflash_trt import __version__
from dflash_trt.cli.version import commit
from tests.paths import FIXTURES, REPOSITORY

pytestmark = pytest.mark.full

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
    environment = tmp_path_factory.mktemp("environment")
    settings = ("-Ccmake.define.DFLASH_CUDA=OFF", f"-Cbuild-dir={environment}/build")  # one for each worker of pytest
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", *settings, "--wheel-dir", environment, REPOSITORY)
    venv.create(environment, with_pip=True)
    run(environment / "bin" / "pip", "install", f"{wheel(environment)}[observe]", cwd=environment)
    return environment / "bin"


def wheel(environment: Path) -> Path:
    return next(environment.glob(f"dflash_trt-{__version__}-*.whl"))


def alone(programs: Path, folder: Path, *command: object) -> str:
    """Output of a program of the environment, from a directory without the checkout."""
    return run("env", "-i", f"PATH={programs}:/usr/bin:/bin", f"HOME={folder}", *command, cwd=folder)


def test_the_wheel_says_its_commit(programs: Path, tmp_path: Path) -> None:
    recorded = os.environ.get("DFLASH_COMMIT") or commit()
    lines = alone(programs, tmp_path, "dflash-trt", "--version").splitlines()
    assert lines[:2] == [f"dflash-trt, version {__version__}", f"commit: {recorded}"]
    assert lines[2].startswith("kernels: none: built without nvcc")
    place = alone(programs, tmp_path, "python", "-c", "import dflash_trt; print(dflash_trt.__file__)")
    assert Path(place.strip()).is_relative_to(programs.parent)


def test_the_wheel_names_whose_code_it_holds(programs: Path) -> None:
    with zipfile.ZipFile(wheel(programs.parent)) as files:
        folder = f"dflash_trt-{__version__}.dist-info/licenses"
        notice = files.read(f"{folder}/NOTICE").decode()
        assert f"{folder}/LICENSE" in files.namelist()
    assert all(owner in notice for owner in ("Wenzel Jakob", "Thibaut Goetghebuer-Planchon", "NVIDIA CUDA Runtime"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, programs: Path, tmp_path: Path) -> None:
    alone(programs, tmp_path, "bash", REPOSITORY / "tests" / "installed" / f"{name}.sh", *SCRIPTS[name])
