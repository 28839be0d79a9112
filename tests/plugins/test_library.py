# SPDX-License-Identifier: Apache-2.0
"""The library file: what it exports and needs, and how it is found."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_trt import _C
from dflash_trt.engine.plans import tensorrt_api as plugin
from dflash_trt.engine.plans.tensorrt_api import installed_library, plugin_library
from dflash_trt.errors import MissingDependencyError


def symbols(library: Path | str, option: str) -> set[str]:
    """Names in a library's dynamic symbol table."""
    if shutil.which("nm") is None:
        pytest.skip("no nm: install binutils")
    command = ["nm", "-D", "--format=just-symbols", option, str(library)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_it_exports_what_the_registry_looks_up_and_nothing_else() -> None:
    assert symbols(installed_library(), "--defined-only") == {"getCreators", "setLoggerFinder"}


def test_the_module_exports_what_python_and_onnxruntime_look_up_and_nothing_else() -> None:
    """A C++ library that a compiler links in shares no symbol with the one that torch has loaded."""
    assert symbols(_C.__file__, "--defined-only") == {"PyInit__C", "RegisterCustomOps"}


def test_it_needs_neither_tensorrt_nor_cuda() -> None:
    foreign = ("nvinfer", "getPluginRegistry", "getLogger", "cuda", "cu")
    needed = symbols(installed_library(), "--undefined-only")
    assert needed
    assert [name for name in needed if name.startswith(foreign) or "nvinfer" in name] == []


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)


def test_the_variable_names_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libother.so"
    library.touch()
    monkeypatch.setenv(plugin.VARIABLE, str(library))
    assert plugin_library() == library


def test_a_variable_that_names_no_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(plugin.VARIABLE, str(tmp_path))
    with pytest.raises(MissingDependencyError, match=f"DFLASH_TRT_PLUGIN: no plugin library at {tmp_path}\n"):
        plugin_library()


def test_the_installed_library_counts_only_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", lambda: ["90a"])
    assert plugin_library() == installed_library()
    monkeypatch.setattr(_C, "cuda_architectures", lambda: [])
    with pytest.raises(MissingDependencyError, match=r"left them out\nhint: .*pip install .*DFLASH_CUDA=ON"):
        plugin_library()


def test_no_installed_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "installed_library", lambda: tmp_path / "none.so")
    with pytest.raises(MissingDependencyError, match=r"no plugin library at .*\nhint: cmake"):
        plugin_library()
