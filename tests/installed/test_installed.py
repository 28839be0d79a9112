# SPDX-License-Identifier: Apache-2.0
"""New users with the wheel in an empty environment, no checkout near: scripts as they stand, and commands of pages."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from dflash_trt import __version__
from dflash_trt.cli.version import commit
from tests.engines import trained_engine
from tests.paths import FIXTURES, REPOSITORY
from tests.runtime.server.live import started
from tests.test_readme import FENCE

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


def walk(programs: Path, folder: Path, page: str, heading: str, substitutes: dict[str, object]) -> str:
    """Output of the first commands below a heading of a page, with some words replaced."""
    script = FENCE.findall((REPOSITORY / "docs" / page).read_text().partition(heading)[2])[0]
    for words, fitting in substitutes.items():
        assert words in script
        script = script.replace(words, str(fitting))
    return alone(programs, folder, "bash", "-euo", "pipefail", "-c", script)


def test_swapping_eagle3(programs: Path, tmp_path: Path) -> None:
    """The command is converted without the hub, its other words as they were; then a GPU begins."""
    said = walk(programs, tmp_path, "swap_eagle3.md", "# Swap EAGLE-3", {})
    assert "z-lab/Qwen3-8B-DFlash-b16" in said
    before, after = ((tmp_path / name).read_text() for name in ("eagle3.sh", "dflash.sh"))
    assert '"method": "dflash"' in after
    assert before.splitlines()[0].replace("8001", "8002") == after.splitlines()[0]


def test_a_slow_endpoint(programs: Path, tmp_path: Path) -> None:
    """An operator with `observe` alone asks a server that runs in another environment, and later asks again."""
    with started(trained_engine("tiny-gpt-oss"), FIXTURES / "tiny-gpt-oss", tmp_path / "log") as server:
        url = {"http://localhost:8000": f"{server.await_url()} --seconds 600"}
        said = walk(programs, tmp_path, "slow_endpoint.md", "# A slow or wrong endpoint", url)
    assert "against the baseline's" in said
    assert said.count("nothing wrong in") == 2


def test_plans_for_a_card_at_home(programs: Path, tmp_path: Path) -> None:
    """A machine without a GPU builds the plans; then the card begins."""
    pair = {
        "-e '.[rtx]'": f"'{wheel(programs.parent)}[rtx]'",
        "z-lab/Qwen3-8B-DFlash-b16": FIXTURES / "tiny-qwen3-dflash",
        "Qwen/Qwen3-8B": FIXTURES / "tiny-qwen3",
    }
    said = walk(programs, tmp_path, "engine.md", "## An RTX 5090 at home", pair)
    assert "plans: context, draft" in said
    assert (tmp_path / "engine" / "draft.plan").stat().st_size > 1_000_000
