# SPDX-License-Identifier: Apache-2.0
"""Kernels of one instruction set define no symbol that the linker could take for the other ones."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpp.test_other_machines import tool
from tests.paths import REPOSITORY


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86")
def test_no_kernel_has_a_weak_symbol(tmp_path: Path) -> None:
    """A linker keeps one definition of a weak symbol such as std::min<long>: AVX-512's would crash machines without it.

    Without optimisation nothing is inlined, so every function shows that a compiler might emit.
    """
    options = ("-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DDFLASH_PYTHON=OFF", "-DDFLASH_CUDA=OFF")
    configure = [tool("cmake"), "-S", str(REPOSITORY / "cpp"), "-B", str(tmp_path), *options]
    subprocess.run(configure, check=True, capture_output=True)
    commands = [
        [*shlex.split(unit["command"]), "-O0", "-o", str(tmp_path / f"{i}.o")]
        for i, unit in enumerate(json.loads((tmp_path / "compile_commands.json").read_text()))
        if "-mavx2" in unit["command"]
    ]
    assert len(commands) == 7

    def weak_symbols(command: list[str]) -> list[str]:
        subprocess.run(command, check=True, cwd=tmp_path)
        lines = subprocess.check_output([tool("nm"), "--demangle", command[-1]], text=True).splitlines()
        return [line for line in lines if line.split(maxsplit=2)[1] in ("W", "V", "u")]

    with ThreadPoolExecutor(2) as pool:
        assert [line for lines in pool.map(weak_symbols, commands) for line in lines] == []
