# SPDX-License-Identifier: Apache-2.0
"""Where the TensorRT plugin library lies, or why there is none."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_trt import _C
from dflash_trt.errors import MissingDependencyError

VARIABLE = "DFLASH_TRT_PLUGIN"
NAME = "libdflash_trt_plugins.so"
BUILD = (
    "cmake -S plugins -B build/plugins -DDFLASH_CUDA=ON && cmake --build build/plugins, "
    f"then export {VARIABLE}=build/plugins/{NAME}"
)
INSTALL = "in the source directory: pip install --no-deps --editable . -C cmake.define.DFLASH_CUDA=ON"


def plugin_library() -> Path:
    """The library to load into TensorRT: the file that DFLASH_TRT_PLUGIN names, else the installed one.

    MissingDependencyError where there is none, or the installed one holds no kernel.
    """
    if named := os.environ.get(VARIABLE):
        return _named(Path(named))
    library = installed_library()
    if not library.is_file():
        raise MissingDependencyError(f"no plugin library at {library}", hint=BUILD)
    if not _C.cuda_architectures():
        raise MissingDependencyError(
            f"expected a plugin library with CUDA kernels, found {library}, whose build left them out",
            hint=f"{INSTALL} (needs nvcc; an editable install leaves the kernels out, because they take minutes)",
        )
    return library


def installed_library() -> Path:
    """Where the package's own build puts the library, with kernels or without."""
    return Path(_C.__file__).parent / "lib" / NAME


def _named(library: Path) -> Path:
    if library.is_file():
        return library.resolve()
    raise MissingDependencyError(
        f"{VARIABLE}: no plugin library at {library}", hint=f"unset {VARIABLE}, or build one: {BUILD}"
    )
