# SPDX-License-Identifier: Apache-2.0
"""How many experts a pass touches, by the routing of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from dflash_trt.observe.estimate.kernel_times import TABLE_EXPONENT


@cache
def power_law(num_experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """The probability that a token takes each expert, popularity falling as rank^-exponent; they sum to top_k."""
    weights = [(rank + 1) ** -exponent for rank in range(num_experts)]
    return inclusion(weights, top_k)


def inclusion(weights: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Popularity (any scale) as the probability that a token takes each expert, at most 1, of sum `top_k`.

    p_i = 1 - (1 - w_i)^m with the m that gives the sum: nearly top_k draws without replacement.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if top_k >= sum(share > 0 for share in shares):
        return tuple(float(share > 0) for share in shares)
    low, high = 0.0, 1.0
    while touched(shares, high) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if touched(shares, middle) < top_k else (low, middle)
    return tuple(1 - (1 - share) ** high for share in shares)


def touched(probabilities: Sequence[float], tokens: float) -> float:
    """Expected number of experts that `tokens` tokens take between them: sum of 1 - (1 - p_i)^tokens."""
    return float(sum(1 - (1 - p) ** tokens for p in probabilities))


def skew(probabilities: Sequence[float]) -> float:
    """Unevenness of the experts' load: 0 where all are taken alike, 1 as under rank^-1.2, the law of the tables."""
    law = _variation(power_law(len(probabilities), round(sum(probabilities)), TABLE_EXPONENT))
    return min(1.0, _variation(probabilities) / law) if law else 0.0


def _variation(probabilities: Sequence[float]) -> float:
    """Squared coefficient of variation."""
    return len(probabilities) * sum(p * p for p in probabilities) / sum(probabilities) ** 2 - 1
