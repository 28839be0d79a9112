# SPDX-License-Identifier: Apache-2.0
"""Functions on tensors that torch.compile makes a kernel or two of on a GPU, where torch launches one for each step."""

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
"""Sizes are compiled for as they first are, and then any, but for a size of 1; torch (2.11) would give up after 8."""
ROUNDS_EACH = {"emulate_precision_casts": True}
"""Inductor's option that takes FMA from Triton, too, so that each product and each sum rounds: in torch later than 2.9
(pytorch's pull request 163073; read in 2.13)."""
FAILED: set[str] = set()
"""Names of functions that torch.compile could not compile, which was said."""


class Fused:
    """A function whose first tensor says where it runs: compiled on a GPU, as it is written elsewhere."""

    def __init__(self, function: Callable[..., Any], name: str | None = None, **options: Any) -> None:
        """`name` is for people; functions of one name have one fate. Options are those of torch.compile."""
        self.function, self._options = function, options
        self.name = name or function.__qualname__
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        first = next(value for value in chain(args, keywords.values()) if isinstance(value, Tensor))
        if self.name in FAILED or not on_gpu(first) or why_not_compiled() is not None:
            return self.function(*args, **keywords)
        from torch._dynamo.exc import TorchDynamoException  # of Inductor and Triton, too

        try:
            if self._compiled is None:  # a compiled module has no truth value
                self._compiled = compiled(self.function, **self._options)
            return self._compiled(*args, **keywords)
        except TorchDynamoException as error:  # what was written until then is written again
            FAILED.add(self.name)
            why = first_line(getattr(error, "inner_exception", error))
            LOG.warning("torch.compile made no kernel of %s, so passes take longer: %s", self.name, why)
        return self.function(*args, **keywords)


def on_gpu(tensor: Tensor) -> bool:
    """Whether it lies there."""
    return tensor.is_cuda


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """What torch.compile makes of it, by its `options`; functions of one code share the kernels."""
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_VARIANTS)
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)
    return torch.compile(function, **options)


@cache
def why_not_compiled() -> str | None:
    """What torch.compile lacks here to make kernels for a GPU; None where nothing is missing."""
    if find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "a C compiler"
    headers = Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").is_file() else f"{headers / 'Python.h'}"
