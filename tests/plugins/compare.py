# SPDX-License-Identifier: Apache-2.0
"""Comparison of an output with what it should be: NaN and infinity first, then values; the worst coordinate is told."""

from __future__ import annotations

import torch

# Half the distance from 1 to the next number: the relative error of one rounding.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}


def rounding(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far from `expected` its nearest number of `dtype` may lie."""
    return (expected.double().abs() * UNIT[dtype]).clamp_min(SMALLEST[dtype] / 2)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float) -> None:
    """|actual - expected| <= tolerance everywhere; NaN where NaN is expected, and the same infinities."""
    assert actual.shape == expected.shape, f"expected shape {tuple(expected.shape)}, found {tuple(actual.shape)}"
    a, e = actual.double().cpu(), expected.double().cpu()
    for name, special in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = special(a) != special(e)
        assert not differ.any(), f"{int(differ.sum())} of {a.numel()} differ in being {name}, first {_first(differ)}"
    error = torch.where(torch.isfinite(e), (a - e).abs(), 0)
    excess = error - torch.as_tensor(tolerance, dtype=torch.float64).cpu().expand_as(error)
    if not (excess > 0).any():
        return
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), error.shape))
    raise AssertionError(
        f"{int((excess > 0).sum())} of {a.numel()} are too far; worst at {worst}: "
        f"found {a[worst].item():.9g}, expected {e[worst].item():.9g}, "
        f"off by {error[worst].item():.3g}, allowed {error[worst].item() - excess[worst].item():.3g}"
    )


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])
