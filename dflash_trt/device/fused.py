# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile fuses into a kernel or two on a GPU, where torch would launch one per operator."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.errors import first_line

LOG = logging.getLogger("dflash_trt.runtime")
MAX_VARIANTS = 64
"""Limit on compiled variants of a function: its first size, then any size, and size 1 apart. Torch's is 8 (2.11)."""
ROUNDS_EACH = {"emulate_precision_casts": True}
"""Inductor's option that also keeps Triton from using FMA, so that each product and each sum rounds; in torch after
2.9 (pytorch's pull request 163073; read in 2.13)."""
FAILED: set[str] = set()
"""Names of functions that torch.compile could not compile; each was logged once."""


class Fused:
    """A function that is compiled if its first tensor is on a GPU, and runs as written elsewhere."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, **options: Any) -> None:
        """`name` is for the log; if one function fails to compile, all of that name run as written."""
        self.function, self._options = function, options
        self.name = name or function.__qualname__
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        first = next(value for value in chain(args, keywords.values()) if isinstance(value, Tensor))
        if self.name in FAILED or not on_gpu(first) or why_not_compiled() is not None:
            return self.function(*args, **keywords)
        from torch._dynamo.exc import TorchDynamoException  # a base of Inductor's and Triton's errors, too

        try:
            if self._compiled is None:  # a compiled module has no truth value
                self._compiled = compiled(self.function, **self._options)
            return self._compiled(*args, **keywords)
        except TorchDynamoException as error:  # outputs written so far are written again
            FAILED.add(self.name)
            why = first_line(getattr(error, "inner_exception", error))
            LOG.warning("torch.compile made no kernel of %s, so passes take longer: %s", self.name, why)
        return self.function(*args, **keywords)


def on_gpu(tensor: Tensor) -> bool:
    """Whether `tensor` is on a GPU."""
    return tensor.is_cuda


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` compiled with these options of torch.compile; functions with the same code share the kernels."""
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_VARIANTS)
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)
    return torch.compile(function, **options)


@cache
def why_not_compiled() -> str | None:
    """The tool that torch.compile lacks here to make kernels for a GPU; None if nothing is missing."""
    if find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "a C compiler"
    headers = Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").is_file() else f"{headers / 'Python.h'}"
