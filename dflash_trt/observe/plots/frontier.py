# SPDX-License-Identifier: Apache-2.0
"""Points of throughput against the speed of one user, and the line between the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    pass


class Rated(Protocol):
    """A point: speed of one user, and throughput of all."""

    @property
    def user_rate(self) -> float:
        """Tokens a second of one user."""

    @property
    def gpu_rate(self) -> float:
        """Tokens a second of all users, per GPU (or of the whole server)."""


P = TypeVar("P", bound=Rated)


def frontier(candidates: Iterable[P]) -> list[P]:
    """The Pareto-optimal points, fastest user first."""
    best: list[P] = []
    for candidate in sorted(candidates, key=lambda p: (-p.user_rate, -p.gpu_rate)):
        if not best or candidate.gpu_rate > best[-1].gpu_rate:
            best.append(candidate)
    return best


def rate_between(front: Sequence[Rated], user_rate: float) -> float | None:
    """Throughput of a frontier at `user_rate` per user, interpolated linearly; None beyond either end."""
    if not front or not front[-1].user_rate <= user_rate <= front[0].user_rate:
        return None
    for fast, slow in pairwise(front):
        if slow.user_rate <= user_rate:
            share = (fast.user_rate - user_rate) / (fast.user_rate - slow.user_rate)
            return fast.gpu_rate + share * (slow.gpu_rate - fast.gpu_rate)
    return front[-1].gpu_rate
