# SPDX-License-Identifier: Apache-2.0
"""The one door to the tensorrt module and our plugin's library.

Written against the bindings 10.15.1 and 11.4.0, not yet run with libnvinfer.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from dflash_trt import _C
from dflash_trt.errors import EngineError, MissingDependencyError

# The oldest release whose bindings every call of ours was compared with (tests/contract). The graphs alone would allow
# an older one: the ONNX parser of 10.10 reads them. B300 begins with 10.14.1.
OLDEST = (10, 15)
VARIABLE = "DFLASH_TRT_PLUGIN"
NAME = "libdflash_trt_plugins.so"
BUILD = (
    "cmake -S plugins -B build/plugins -DDFLASH_CUDA=ON && cmake --build build/plugins, "
    f"then export {VARIABLE}=build/plugins/{NAME}"
)
WITH_KERNELS = "in the source directory: pip install --no-deps --editable . -C cmake.define.DFLASH_CUDA=ON"
INSTALL = "on the GPU machine: pip install 'dflash-trt[tensorrt]'"


def load_tensorrt() -> Any:
    """The module. Raises MissingDependencyError where it is missing, broken or older than `OLDEST`."""
    try:
        trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"expected the package tensorrt {'.'.join(map(str, OLDEST))} or newer, found: {error}", hint=INSTALL
        ) from None
    if version_of(str(trt.__version__)) < OLDEST:
        raise MissingDependencyError(
            f"expected the package tensorrt {'.'.join(map(str, OLDEST))} or newer, found {trt.__version__}",
            hint="pip install --upgrade 'dflash-trt[tensorrt]'",
        )
    return trt


def version_of(text: str) -> tuple[int, int]:
    """Major and minor: '11.4.0.106' -> (11, 4)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise EngineError(f"TensorRT version: expected major.minor, found {text!r}")
    return int(match[1]), int(match[2])


def make_logger(trt: Any) -> Any:
    """Warnings and errors go to stderr, as TensorRT prints them."""
    return trt.Logger(trt.Logger.WARNING)


def load_plugin(trt: Any, library: Path, name: str, version: str, namespace: str) -> None:
    """Registers the creators of `library`, once; raises EngineError when the plugin is not among them."""
    registry = trt.get_plugin_registry()
    if registry.get_creator(name, version, namespace) is not None:
        return
    registry.load_library(str(library))
    if registry.get_creator(name, version, namespace) is None:
        raise EngineError(
            f"{library}: expected the plugin {namespace}::{name} version {version},"
            f" found none that TensorRT {trt.__version__} registers",
            hint="dflash-trt doctor says why it does not load",
        )


def plugin_library() -> Path:
    """The library to load into TensorRT: the file that DFLASH_TRT_PLUGIN names, else the installed one.

    Raises MissingDependencyError if it is missing, or the installed one has no kernels.
    """
    if named := os.environ.get(VARIABLE):
        return _named(Path(named))
    library = installed_library()
    if not library.is_file():
        raise MissingDependencyError(f"no plugin library at {library}", hint=BUILD)
    if not _C.cuda_architectures():
        raise MissingDependencyError(
            f"expected a plugin library with CUDA kernels, found {library}, whose build left them out",
            hint=f"{WITH_KERNELS} (needs nvcc; an editable install leaves the kernels out, because they take minutes)",
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
