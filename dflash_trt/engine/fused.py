# SPDX-License-Identifier: Apache-2.0
"""Functions on tensors that torch.compile makes a kernel or two of on a GPU, where torch launches one for each step."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.errors import first_line

LOG = logging.getLogger("dflash_trt.runtime")
MAX_VARIANTS = 64
"""Sizes are compiled for as they first are, and then any, but for a size of 1; torch (2.11) would give up after 8."""
FAILED: set[Callable[..., Any]] = set()
"""Functions that torch.compile could not compile, which was said."""


class Fused:
    """A function whose first tensor says where it runs: compiled on a GPU, as it is written elsewhere."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not on_gpu(next(value for value in args if isinstance(value, Tensor))) or why_not_compiled() is not None:
            return self.function(*args, **keywords)
        from torch._dynamo import config as dynamo_config
        from torch._dynamo.exc import TorchDynamoException  # of Inductor and Triton, too

        if self.function not in FAILED:
            try:
                with dynamo_config.patch(recompile_limit=MAX_VARIANTS):
                    return compiled(self.function)(*args, **keywords)
            except TorchDynamoException as error:  # before anything was written
                FAILED.add(self.function)
                name = getattr(self.function, "__name__", self.function)
                why = first_line(getattr(error, "inner_exception", error))
                LOG.warning("torch.compile made no kernel of %s, so passes take longer: %s", name, why)
        return self.function(*args, **keywords)


def on_gpu(tensor: Tensor) -> bool:
    """Whether it lies there."""
    return tensor.is_cuda


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile makes of it, once for all that share it."""
    return torch.compile(function)


@cache
def why_not_compiled() -> str | None:
    """What torch.compile lacks here to make kernels for a GPU; None where nothing is missing."""
    if find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "a C compiler"
    headers = Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").is_file() else f"{headers / 'Python.h'}"
