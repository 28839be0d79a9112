# SPDX-License-Identifier: Apache-2.0
"""Calls of this package's C++ on torch's tensors and threads: a second pool would spin against torch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LinearKernel = Callable[..., None]
"""`_C.linear_panels` or `_C.linear_bfloat16`."""


def one_weight(kernel: LinearKernel, weight: Tensor, num_outputs: int, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in] by a weight, and bias [out] -> [..., out]."""
    out = rows.new_empty(*rows.shape[:-1], num_outputs)
    num_inputs = rows.shape[-1]
    _call(kernel, (rows.numel() // num_inputs,), weight, bias, rows, out)
    return out


def grouped(
    kernel: LinearKernel, weights: Tensor, num_outputs: int, biases: Tensor | None, rows: Tensor, counts: Sequence[int]
) -> Tensor:
    """rows [R, in], counts[e] of them by weights[e] and biases[e] of [E, out], end to end -> [R, out]."""
    out = rows.new_empty(len(rows), num_outputs)
    _call(kernel, counts, weights, biases, rows, out)
    return out


def _call(
    kernel: LinearKernel, counts: Sequence[int], weight: Tensor, bias: Tensor | None, rows: Tensor, out: Tensor
) -> None:
    rows = rows.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    x, weight_at, out_at = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
    kernel(x, counts, weight_at, out.shape[-1], rows.shape[-1], bias_at, out_at, *openmp_team())


def openmp_team() -> tuple[int, int]:
    """Number of threads, and the address of GOMP_parallel in torch's OpenMP library, or 0: then C++ uses one."""
    return torch.get_num_threads(), _gomp_parallel()


@cache
def _gomp_parallel() -> int:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
