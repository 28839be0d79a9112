# SPDX-License-Identifier: Apache-2.0
"""Draft length by batch, within a speed of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_trt.deploy.batch_schedule import Schedule
from dflash_trt.observe.estimate.curve import BATCHES

Price = Callable[[int, int], float]
"""Tokens a second of one user by batch and draft length."""
TIE = 0.02
"""A shorter schedule is preferred if it costs less than this."""


def schedule_for(price: Price, largest: int, lengths: Sequence[int], slo: float) -> Schedule:
    """Draft lengths by batch up to `largest`; a length is kept as long as it keeps the speed and none is better by more
    than TIE.

    Runtimes draft at most the first length. It is the best for one user that keeps the speed at every batch; if there
    is none, the best for one user.
    """
    starts = [batch for batch in BATCHES if batch < largest] + [largest]
    ends = [start - 1 for start in starts[1:]] + [largest]
    prices = {batch: {k: price(batch, k) for k in lengths} for batch in {*starts, *ends}}
    tried: list[Schedule] = []
    for first in sorted(lengths, key=lambda k: (-prices[1][k], k)):
        schedule: list[tuple[int, int]] = [(1, first)]
        keeps = True
        for start, end in zip(starts, ends, strict=True):
            slowest = {k: min(prices[start][k], prices[end][k]) for k in lengths if k <= first}
            top = max(slowest, key=lambda k: (slowest[k] >= slo, prices[start][k], -k))
            last = schedule[-1][1]
            is_better = slowest[last] < slo <= slowest[top] or prices[start][last] * (1 + TIE) < prices[start][top]
            if start > 1 and is_better:
                schedule.append((start, top))
            keeps = keeps and slowest[schedule[-1][1]] >= slo
        if keeps:
            return tuple(schedule)
        tried.append(tuple(schedule))
    return tried[0]
