# SPDX-License-Identifier: Apache-2.0
"""Kernels that TensorRT-RTX compiled for a plan on this GPU, stored next to the plan for the next start.

Written against the real bindings; not yet run on a GPU.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from dflash_trt.engine.plans import machine
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.files.read import read_bytes
from dflash_trt.files.write import OutputKind, new_file

LOG = logging.getLogger("dflash_trt.engine")
SUFFIX = ".jit"
MAX_BYTES = 2**30
KIND = OutputKind(name="compiled kernels", recognizes=lambda file: True, form="file", is_cache=True)


def jit_cache_file(plan: Path, gpu: Gpu) -> Path:
    """Name for this GPU model and driver: draft.plan.nvidia-geforce-rtx-5090-13.0.jit."""
    model = re.sub("[^a-z0-9]+", "-", gpu.name.lower())
    return plan.with_name(f"{plan.name}.{model}-{machine.driver_version()}{SUFFIX}")


def is_of_plan(name: str, plan: str) -> bool:
    """Whether a file with this name has a plan's compiled kernels."""
    return name.startswith(f"{plan}.") and name.endswith(SUFFIX)


class JitCache:
    """The runtime cache of one plan's contexts."""

    def __init__(self, cache: Any, file: Path) -> None:
        """Fills the IRuntimeCache from `file`, if it exists; TensorRT-RTX rejects one from another environment."""
        self._cache, self._file = cache, file
        self._content = read_bytes(file, EngineError, limit=MAX_BYTES) if file.is_file() else b""
        if self._content and not cache.deserialize(self._content):
            LOG.warning("%s: compiled for another GPU, driver or TensorRT-RTX; compiling again", file)
            self._content = b""

    def save(self) -> None:
        """Replaces the file if something was compiled; an unwritable directory is a warning."""
        content = bytes(memoryview(self._cache.serialize()))
        if content == self._content:
            return
        try:
            with new_file(self._file, KIND, force=True) as temporary:
                temporary.write_bytes(content)
        except BuildError as problem:
            LOG.warning("%s; kernels are compiled at every start", problem.message)
        self._content = content
