# SPDX-License-Identifier: Apache-2.0
"""Torch's threads, lent to the C++ of this package: a second pool would spin against the first."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


def openmp_team() -> tuple[int, int]:
    """How many threads, and the address of GOMP_parallel in torch's OpenMP library, or 0: then C++ takes one."""
    return torch.get_num_threads(), _gomp_parallel()


@cache
def _gomp_parallel() -> int:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
