# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.engine.plans.load_plugin LIBRARY`: loads it into TensorRT's registry and says what is in it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

PACKAGES = ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_rtx_bindings")
NAMESPACE = "dflash_trt"


def main(library: str) -> None:
    """Prints one line; raises an exception if the library has no plugin of ours. Needs no GPU."""
    trt = _tensorrt()
    if trt is None:
        print("not loaded: there is no TensorRT package here", flush=True)
        return
    registry = trt.get_plugin_registry()
    registry.load_library(library)
    ours = [f"{c.name} {c.plugin_version}" for c in registry.all_creators if c.plugin_namespace == NAMESPACE]
    if not ours:
        raise ValueError(f"{trt.__name__} {trt.__version__} finds no plugin in it")
    print(f"loaded by {trt.__name__} {trt.__version__}: {', '.join(ours)}", flush=True)
    os._exit(0)  # objects of the library must not outlive it, and the interpreter's order at exit is not ours


def _tensorrt() -> Any:
    for package in PACKAGES:
        try:
            return importlib.import_module(package)
        except (ImportError, OSError):
            continue
    return None


if __name__ == "__main__":
    main(sys.argv[1])
