# SPDX-License-Identifier: Apache-2.0
"""Compiles `_C` and the plugin by cmake into the package, for a machine that cannot fetch what pip would build with.

    python benchmarks/compile_kernels.py DFLASH_CUDA=ON DFLASH_CUDA_ARCHITECTURES=90a

Needs cmake, a C++ compiler, nanobind and, for kernels, nvcc. Without definitions: for the GPU that torch sees.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PRODUCTS = {"_C*.so": ".", "libdflash_trt_plugins.so": "lib"}
"""Built libraries, with their places in the package."""
ARCHITECTURES = "DFLASH_CUDA_ARCHITECTURES"
EXPERIMENTAL = "DFLASH_EXPERIMENTAL_KERNELS=ON"


def definitions() -> list[str]:
    """Kernels for the first GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return ["DFLASH_CUDA=ON", f"{ARCHITECTURES}={major}{minor}a", EXPERIMENTAL]


def is_built(package: Path, defines: Sequence[str]) -> bool:
    """Whether every product is there, newer than its sources, with kernels for the architecture that is asked for."""
    products = [file for pattern, place in PRODUCTS.items() for file in (package / place).glob(pattern)]
    sources = [file for room in ("cpp", "plugins") for file in (REPOSITORY / room).rglob("*") if file.is_file()]
    if len(products) < len(PRODUCTS) or min(map(_age, sources)) <= max(map(_age, products)):
        return False
    sys.path.insert(0, str(package.parent))
    from dflash_trt import _C

    asked = [value for name, _, value in (define.partition("=") for define in defines) if name == ARCHITECTURES]
    experimental = {"short", "ahead"} if EXPERIMENTAL in defines else set()
    return set(asked) <= set(_C.cuda_architectures()) and experimental <= set(_C.kv_injection_attention_kernels())


def _age(file: Path) -> float:
    return -file.stat().st_mtime


def compile_into(package: Path, defines: Sequence[str]) -> list[Path]:
    """The files that were built and copied into `package`; CalledProcessError where cmake fails."""
    with tempfile.TemporaryDirectory() as build:
        options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        options += [f"-D{define}" for define in defines]
        subprocess.run(["cmake", "-S", str(REPOSITORY / "cpp"), "-B", build, *options], check=True)
        subprocess.run(["cmake", "--build", build, f"-j{os.cpu_count()}"], check=True)
        found = [(file, package / place) for pattern, place in PRODUCTS.items() for file in Path(build).rglob(pattern)]
        for _, place in found:
            place.mkdir(exist_ok=True)
        return [Path(shutil.copy(file, place)) for file, place in found]


def main() -> None:
    """Prints the paths of what was built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("defines", nargs="*", metavar="NAME=VALUE", help="definitions of cmake")
    parser.add_argument("--package", type=Path, default=REPOSITORY / "dflash_trt", help="where the files go")
    parser.add_argument("--if-stale", action="store_true", help="only where sources are newer, or kernels are missing")
    arguments = parser.parse_args()
    defines = arguments.defines or definitions()
    if arguments.if_stale and is_built(arguments.package, defines):
        print(f"{arguments.package}: built before, and newer than its sources")
    else:
        print(*compile_into(arguments.package, defines), sep="\n")


if __name__ == "__main__":
    main()
