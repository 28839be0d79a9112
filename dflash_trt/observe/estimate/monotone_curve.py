# SPDX-License-Identifier: Apache-2.0
"""Curves through measured times."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

Curve = Callable[[float], float]


def curve_through(points: Sequence[tuple[float, float]]) -> Curve:
    """Interpolates logarithms; constant before the first point, proportional after the last."""

    def at(x: float) -> float:
        place = bisect_right(points, (x, math.inf))
        if place == 0:
            return points[0][1]
        (x0, y0) = points[place - 1]
        if place == len(points):
            return y0 * x / x0
        x1, y1 = points[place]
        share = math.log(x / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    return at


@cache
def monotone(table: tuple[tuple[int, float], ...]) -> list[tuple[float, float]]:
    """Tokens and microseconds, measurement noise removed: more tokens never take less."""
    return list(zip((float(tokens) for tokens, _ in table), accumulate((time for _, time in table), max), strict=True))
