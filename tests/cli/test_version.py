# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt --version`: version, commit and kernels, in a checkout and where it was installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_trt import _C, __version__
from dflash_trt.cli.version import commit, kernels
from tests.cli.commands import run
from tests.paths import REPOSITORY


def git(checkout: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", checkout, *identity, *words], check=True, capture_output=True, text=True).stdout


def test_version() -> None:
    lines = run("--version").stdout.splitlines()
    assert lines[0] == f"dflash-trt, version {__version__}"
    assert lines[1] == f"commit: {commit()}"
    assert lines[2] == f"kernels: {kernels()}"


def test_the_changelog_begins_with_this_version() -> None:
    assert re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__


def test_the_commit_of_a_checkout_is_what_git_says_now(tmp_path: Path) -> None:
    (package := tmp_path / "dflash_trt").mkdir()
    (package / "commit").write_text("recorded\n")
    assert commit(package) == "recorded"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=a")
    git(tmp_path, "tag", "v0")
    head = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit(package) == head
    (package / "commit").write_text("changed\n")
    assert commit(package) == f"{head}-dirty"
    shutil.rmtree(tmp_path / ".git" / "refs")
    assert commit(package).startswith("not known: fatal")


def test_a_build_without_git_says_so(tmp_path: Path) -> None:
    (package := tmp_path / "dflash_trt").mkdir()
    assert commit(package) == "not recorded by the build"
    (package / "commit").write_text("\n")
    assert commit(package) == "not recorded by the build"


def test_kernels_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", lambda: ["80", "90a", "100f", "90-virtual"])
    assert kernels() == "SM 8.0, SM 9.0a, SM 10.0f, PTX for SM 9.0 and later"
    monkeypatch.setattr(_C, "cuda_architectures", list)
    assert kernels().startswith("none: built without nvcc")
