# SPDX-License-Identifier: Apache-2.0
"""Drafts shared out among requests: against all ways to do it."""

from __future__ import annotations

import random
from itertools import accumulate, product
from operator import mul

import pytest

from dflash_trt.runtime.shared_drafts import share_out, tokens_by_length

K = 4


def random_batch(rng: random.Random) -> list[list[float]]:
    """Some requests hold always, some never, some now and then; equals occur."""
    shares = [[rng.choice([0.0, 0.5, rng.random(), 1.0]) for _ in range(K)] for _ in range(rng.randint(1, 3))]
    return [list(accumulate(each, mul)) for each in shares]


def expected(reached: list[list[float]], lengths: tuple[int, ...]) -> float:
    return sum(1 + sum(each[:length]) for each, length in zip(reached, lengths, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_way_promises_more(seed: int) -> None:
    reached = random_batch(random.Random(seed))
    batch_size = len(reached)
    tokens = tokens_by_length(reached)
    assert tokens[0] == batch_size
    for length in range(1, K + 1):
        ways = product(range(1, K + 1), repeat=batch_size)
        best = max(expected(reached, way) for way in ways if sum(way) == length * batch_size)
        lengths = share_out(reached, length)
        assert sum(lengths) == length * batch_size
        assert all(1 <= each <= K for each in lengths)
        assert expected(reached, tuple(lengths)) == pytest.approx(best) == pytest.approx(tokens[length])


def test_equals_get_the_same() -> None:
    for share in (0.0, 0.6, 1.0):
        reached = [[share**i for i in range(1, K + 1)]] * 3
        assert [share_out(reached, length) for length in range(K + 1)] == [[length] * 3 for length in range(K + 1)]
