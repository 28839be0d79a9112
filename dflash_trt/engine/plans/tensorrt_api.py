# SPDX-License-Identifier: Apache-2.0
"""The one door to the tensorrt module; written against the bindings 10.15.1 and 11.4.0, not yet run with libnvinfer."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from dflash_trt.errors import EngineError, MissingDependencyError

# The oldest release whose bindings every call of ours was compared with (tests/contract). The graphs alone would allow
# an older one: the ONNX parser of 10.10 reads them. B300 begins with 10.14.1.
OLDEST = (10, 15)
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
