# SPDX-License-Identifier: Apache-2.0
"""Does TensorRT load our plugin library? Asked in a process of its own, because a library that does not fit crashes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from dflash_trt.cli.gpu_report import MachineFinding
from dflash_trt.errors import MissingDependencyError

SECONDS = 120  # the first import of TensorRT reads gigabytes


def plugin_library() -> MachineFinding:
    """The library, and what TensorRT's registry said of it."""
    try:
        from dflash_trt.engine.plans import tensorrt_api

        library = tensorrt_api.plugin_library()
    except MissingDependencyError as error:
        return _missing(error.message, error.hint or "")
    except ImportError as error:  # the compiled module is not built
        return _missing(str(error), "in the source directory: pip install -e .")
    return load(library)


def load(library: Path) -> MachineFinding:
    """Loads `library` with the TensorRT of this machine, full or lean, where there is one."""
    command = [sys.executable, "-m", "dflash_trt.engine.plans.load_plugin", str(library)]
    fix = "build it for this TensorRT, see plugins/README.md"
    try:
        result = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _missing(f"{library} did not load within {SECONDS} s", fix)
    if result.returncode < 0:
        return _missing(f"{library} ended its process by {signal.Signals(-result.returncode).name}", fix)
    if result.returncode > 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        return _missing(f"{library} does not load: {lines[-1]}", fix)
    return MachineFinding(
        name="plugin library", found=f"{library}, {result.stdout.strip()}", needed_for=("TensorRT plans",)
    )


def _missing(reason: str, fix: str) -> MachineFinding:
    return MachineFinding(name=f"plugin library ({reason})", found=None, needed_for=("TensorRT plans",), fix=fix)
