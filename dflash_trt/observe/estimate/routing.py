# SPDX-License-Identifier: Apache-2.0
"""How many experts of a layer a pass touches: under uniform, power-law and measured routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


@cache
def power_law(num_experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """The probability that a token takes each expert, popularity falling as rank^-exponent; they sum to top_k."""
    weights = [(rank + 1) ** -exponent for rank in range(num_experts)]
    return inclusion(weights, top_k)


def inclusion(weights: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Popularity (any scale) as the probability that a token takes each expert, at most 1, of sum `top_k`.

    p_i = 1 - (1 - w_i)^m, with the m that gives the sum: top_k draws without taking an expert twice, nearly.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if top_k >= sum(share > 0 for share in shares):
        return tuple(float(share > 0) for share in shares)
    low, high = 0.0, 1.0
    while sum(1 - (1 - share) ** high for share in shares) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if sum(1 - (1 - share) ** middle for share in shares) < top_k:
            low = middle
        else:
            high = middle
    return tuple(1 - (1 - share) ** high for share in shares)


def touched(probabilities: Sequence[float], tokens: float) -> float:
    """Expected number of experts that `tokens` tokens take between them: sum of 1 - (1 - p_i)^tokens."""
    return float(sum(1 - (1 - p) ** tokens for p in probabilities))
