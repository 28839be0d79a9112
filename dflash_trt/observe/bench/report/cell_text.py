# SPDX-License-Identifier: Apache-2.0
"""Figures as the cells of tables."""

from __future__ import annotations

from dflash_trt.observe.bench.report.intervals import Speedup

NONE = "-"
TAU = "tau of drafting passes"


def factor_text(factor: Speedup | None) -> str:
    """3.1x (2.9-3.3), a dash, or that the figure cannot be."""
    if factor is None:
        return NONE
    if not factor.is_possible:
        return "too busy to tell"
    spread = "" if factor.interval is None else f" ({factor.interval[0]:.2f}-{factor.interval[1]:.2f})"
    return f"{factor.value:.2f}x{spread}"


def rate_text(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def tau_text(tau: float | None) -> str:
    return NONE if tau is None else f"{tau:.2f}"
