# SPDX-License-Identifier: Apache-2.0
"""Access to NVIDIA's TensorRT and TensorRT-RTX, and to our plugin's library.

TensorRT builds plans on the GPU that runs them. TensorRT-RTX builds them on any machine, for a list of GPUs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_trt import _C
from dflash_trt.errors import EngineError, MissingDependencyError

SAID = ("WARNING", "ERROR", "INTERNAL_ERROR")
INT64_INPUT = "has Int64 binding."  # a warning of the parser: older ones took INT32 for it
RuntimeName = Literal["tensorrt", "tensorrt_rtx"]
VARIABLE = "DFLASH_TRT_PLUGIN"
RTX_NAME = "libtensorrt_rtx.so"
NAME = "libdflash_trt_plugins.so"
BUILD = (
    "cmake -S plugins -B build/plugins -DDFLASH_CUDA=ON && cmake --build build/plugins, "
    f"then export {VARIABLE}=build/plugins/{NAME}"
)
WITH_KERNELS = "in the source directory: pip install --no-deps --editable . -C cmake.define.DFLASH_CUDA=ON"


class Runtime(NamedTuple):
    """How TensorRT or TensorRT-RTX is named, imported and installed."""

    title: str
    package: str
    module: str
    oldest: tuple[int, int]
    """Oldest release whose bindings every call of ours was compared with (tests/contract)."""
    install: str


# The graphs alone would allow an older TensorRT: the ONNX parser of 10.10 reads them. B300 begins with 10.14.1.
RUNTIMES: dict[RuntimeName, Runtime] = {
    "tensorrt": Runtime(
        "TensorRT", "tensorrt", "tensorrt", (10, 15), "on the GPU machine: pip install 'dflash-trt[tensorrt]'"
    ),
    "tensorrt_rtx": Runtime(
        "TensorRT-RTX", "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_bindings", (1, 7), "pip install 'dflash-trt[rtx]'"
    ),
}


def load_tensorrt(name: RuntimeName) -> Any:
    """The module. Raises MissingDependencyError if it is missing, broken or older than the oldest known release."""
    runtime = RUNTIMES[name]
    expected = f"expected the package {runtime.package} {'.'.join(map(str, runtime.oldest))} or newer"
    try:
        trt = importlib.import_module(runtime.module)
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"{expected}, found: {error}", hint=runtime.install) from None
    if version_of(str(trt.__version__)) < runtime.oldest:
        upgrade = runtime.install.replace("pip install", "pip install --upgrade")
        raise MissingDependencyError(f"{expected}, found {trt.__version__}", hint=upgrade)
    if name == "tensorrt_rtx":
        _name_library()
    return trt


def _name_library() -> None:
    """Gives the loaded libtensorrt_rtx.so.1 the name libtensorrt_rtx.so as well.

    The ONNX parser opens that name at the first plugin and ends the process if it is missing; NVIDIA's wheel only has
    the other file. Our library of that name is empty and links to the other (cpp/tensorrt_rtx), so the loader finds it
    by name.
    """
    library = installed_library().with_name(RTX_NAME)
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as problem:
        hint = "reinstall dflash-trt; in the source directory: pip install --no-deps --editable ."
        raise MissingDependencyError(f"expected {library} to load, found: {problem}", hint=hint) from None


def version_of(text: str) -> tuple[int, int]:
    """Major and minor: '11.4.0.106' -> (11, 4)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise EngineError(f"TensorRT version: expected major.minor, found {text!r}")
    return int(match[1]), int(match[2])


def make_logger(trt: Any) -> Any:
    """Warnings and errors go to stderr; the bindings' own logger prints warnings on stdout, which is for data.

    The same for all calls, because TensorRT keeps the first of a process.
    """
    return _logger(trt.ILogger)


@cache
def _logger(base: Any) -> Any:
    """An instance of a separate class, because its base class must be TensorRT's."""

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)  # pybind11 asks for it by name

        def log(self, severity: Any, message: str) -> None:
            if severity.name in SAID and not message.endswith(INT64_INPUT):
                print(f"TensorRT: {severity.name.lower()}: {message}", file=sys.stderr)

    return Log()


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


def plugin_library(*, needs_kernels: bool = True) -> Path:
    """The library to load into TensorRT: the file that DFLASH_TRT_PLUGIN names, else the installed one.

    Building for other GPUs needs no kernels, running and timing do. Raises MissingDependencyError if it is missing, or
    the installed one lacks them.
    """
    if named := os.environ.get(VARIABLE):
        return _named(Path(named))
    library = installed_library()
    if not library.is_file():
        raise MissingDependencyError(f"no plugin library at {library}", hint=BUILD)
    if needs_kernels and not _C.cuda_architectures():
        raise MissingDependencyError(
            f"the plugin library {library} was built without CUDA kernels",
            hint=f"{WITH_KERNELS} (needs nvcc; an editable install leaves the kernels out, because they take minutes)",
        )
    return library


def host_code(library: Path) -> str:
    """sha256 of the library's host code, on which plans depend: the same with kernels and without.

    Raises MissingDependencyError for a library that is none of ours.
    """
    try:
        symbol = ctypes.c_char.in_dll(ctypes.CDLL(str(library)), "dflash_host_code")
    except (OSError, ValueError) as problem:
        raise MissingDependencyError(
            f"{library}: expected a plugin library of this version, found: {problem}", hint=BUILD
        ) from None
    return ctypes.string_at(ctypes.addressof(symbol)).decode()


def installed_library() -> Path:
    """Where the package's own build puts the library, with kernels or without."""
    return Path(_C.__file__).parent / "lib" / NAME


def _named(library: Path) -> Path:
    if library.is_file():
        return library.resolve()
    raise MissingDependencyError(
        f"{VARIABLE}: no plugin library at {library}", hint=f"unset {VARIABLE}, or build one: {BUILD}"
    )
