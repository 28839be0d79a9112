# SPDX-License-Identifier: Apache-2.0
"""The plugin library in TensorRT's registry, and libraries that do not fit it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_trt.cli.plugin_report import load, plugin_library
from dflash_trt.engine.plans.tensorrt_api import installed_library

CRASHES = "#include <signal.h>\n__attribute__((constructor)) static void die(void) { raise(SIGSEGV); }\n"
EMPTY = "int nothing;\n"


@pytest.fixture
def needs_tensorrt() -> None:
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")


def compiled(directory: Path, source: str) -> Path:
    (directory / "library.c").write_text(source)
    library = directory / "library.so"
    subprocess.run(
        [shutil.which("cc") or "c++", "-shared", "-fPIC", "-o", str(library), str(directory / "library.c")], check=True
    )
    return library


@pytest.mark.usefixtures("needs_tensorrt")
def test_ours_loads() -> None:
    found = load(installed_library()).found
    assert found is not None
    assert found.startswith(f"{installed_library()}, loaded by tensorrt_lean")
    assert found.endswith("DFlashKVInjectionAttention 3")


@pytest.mark.usefixtures("needs_tensorrt")
@pytest.mark.parametrize(
    ("source", "reason"), [(CRASHES, "ended its process by SIGSEGV"), (EMPTY, "finds no plugin in it")]
)
def test_libraries_that_do_not_fit(source: str, reason: str, tmp_path: Path) -> None:
    library = compiled(tmp_path, source)
    finding = load(library)
    assert finding.found is None
    assert str(library) in finding.name
    assert reason in finding.name
    assert finding.fix is not None
    assert "plugins/README.md" in finding.fix


def test_a_library_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not load within" in load(tmp_path / "library.so").name


def test_a_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(tmp_path / "none.so"))
    finding = plugin_library()
    assert finding.found is None
    assert f"no plugin library at {tmp_path / 'none.so'}" in finding.name
    assert finding.fix is not None
