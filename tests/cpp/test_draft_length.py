# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of auto's choice, next to the same formulas in NumPy, or step by step."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt import _C

K = 5
Array = npt.NDArray[np.float64]


class Counts:
    """AcceptanceCounts as its documentation has it."""

    DECAY, PRIOR, FIRST, POOLED, MAX_ENDED = 0.98, 2.0, 0.5, 6.0, 32

    def __init__(self) -> None:
        self.pooled = np.zeros((2, K))
        self.own: dict[int, Array] = {}
        self.ended: list[Array] = []

    def observe(self, slots: list[int], proposed: list[int], accepted: list[int]) -> None:
        self.pooled[:, : max(proposed)] *= self.DECAY
        for slot, verified, held in zip(slots, proposed, accepted, strict=True):
            seen = np.array([[i < verified and i <= held for i in range(K)], [i < held for i in range(K)]], float)
            self.own[slot] = self.DECAY * self.own.get(slot, np.zeros((2, K))) + seen
            self.pooled += seen

    def release(self, slot: int) -> None:
        counts = self.own.pop(slot, None)
        if counts is not None and counts[0, 0] >= self.POOLED:
            self.ended = [*self.ended, counts][-self.MAX_ENDED :]

    def shares(self) -> Array:
        shares = [self.FIRST]
        for judged, accepted in self.pooled.T:
            shares.append((accepted + self.PRIOR * shares[-1]) / (judged + self.PRIOR))
        return np.array(shares[1:])

    def reached(self, slots: list[int], like_earlier_ones: bool) -> Array:
        rows = []
        for slot in slots:
            shares = self.shares()
            known = [self.ended[slot % len(self.ended)]] if like_earlier_ones and self.ended else []
            for judged, accepted in [*known, self.own.get(slot, np.zeros((2, K)))]:
                shares = (accepted + self.POOLED * shares) / (judged + self.POOLED)
            rows.append(np.cumprod(shares))
        return np.array(rows)


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_the_formulas(seed: int) -> None:
    rng, counts, expected = random.Random(seed), _C.AcceptanceCounts(K), Counts()
    for _ in range(600):
        slots = rng.sample(range(6), rng.randint(1, 6))
        proposed = [rng.randint(0, K) for _ in slots]
        accepted = [rng.randint(0, length) for length in proposed]
        counts.observe(slots, proposed, accepted)
        expected.observe(slots, proposed, accepted)
        if rng.random() < 0.1:
            slot = rng.randrange(7)
            counts.release(slot)
            expected.release(slot)
        asked = rng.sample(range(9), 4)
        for like_earlier_ones in (False, True):
            found = counts.reached(asked, like_earlier_ones)
            assert found == pytest.approx(expected.reached(asked, like_earlier_ones), rel=1e-9)
        assert counts.expected_tokens() == pytest.approx([1.0, *1 + np.cumsum(np.cumprod(expected.shares()))])
    assert len(expected.ended) > 20, "requests have ended, and were remembered"


def test_counts_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="one length"):
        _C.AcceptanceCounts(K).observe([1, 2], [3], [1])
    with pytest.raises(ValueError, match="a position"):
        _C.AcceptanceCounts(0)


def test_more_than_a_block_is_counted_as_a_block() -> None:
    counts = _C.AcceptanceCounts(2)
    counts.observe([0], [5], [5])
    assert counts.reached([0]).shape == (1, 2)


def mean(places: Array, plain: float, whole: float) -> Array:
    """Seconds [N] where nothing else is known."""
    share = 2 * 0.7**2 / (2 * 0.7**2 + 1.5**2)
    found: Array = plain + (whole - plain) * places[:, 2] * (share + (1 - share) * places[:, 1])
    return found


def covariance(a: Array, b: Array, plain: float, whole: float) -> Array:
    """[N, M] of places."""
    (requests, share, drafting), (requests_, share_, drafting_) = a.T[:, :, None], b.T[:, None, :]
    by_request, doublings = requests * requests_, np.log2(requests / requests_)
    bend = np.exp(-((doublings / 1.5) ** 2 + ((share - share_) / 0.25) ** 2) / 2) * (drafting == drafting_)
    same = (requests == requests_) & (share == share_) & (drafting == drafting_)
    drafts = by_request * 1.5**2 * share * share_ + drafting * drafting_ * 0.7**2 * (1.0 + by_request)
    rest = np.outer(mean(a, plain, whole), mean(b, plain, whole)) * (0.2**2 * bend + 0.02**2 * same)
    found: Array = plain**2 * (1.0 + by_request) + max(whole - plain, plain) ** 2 * drafts + rest
    return found


@pytest.mark.parametrize("number", [1, 2, 7, 40])
def test_prices_are_a_gaussian_process(number: int) -> None:
    """Known are one price, ratios of two, and sums of three."""
    rng = random.Random(number)
    places = [(rng.choice([0.25, 0.5, 1.0, 2.0]), k / K, k > 0) for k in (rng.randint(0, K) for _ in range(number))]
    prices = [0.01 * (1 + n * (0.5 + share) + 0.3 * drafting) for n, share, drafting in places]
    known = [([(0, 1.0)], prices[0], 1e-8)]
    for i in range(1, number):
        j, k = rng.randrange(i), rng.randrange(i)
        terms = [(i, 1.0), (j, -prices[i] / prices[j])] if i % 3 else [(i, 1.0), (j, -0.5), (k, -0.4)]
        known.append((terms, sum(weight * prices[place] for place, weight in terms), rng.uniform(0.5, 2.0) * 1e-7))
    asked = [(n, k / K, k > 0) for n in (0.5, 1.0) for k in range(K + 1)]
    scale = prices[0], 3 * prices[0]
    found, covariances = _C.estimate_prices(places, known, scale, asked)

    sums = np.zeros((number, number))
    for row, (terms, _, _) in zip(sums, known, strict=True):
        for place, weight in terms:
            row[place] += weight
    at, of = np.array(places, float), np.array(asked, float)
    variances = np.array([variance for _, _, variance in known])
    prior = sums @ covariance(at, at, *scale) @ sums.T + np.diag(variances)
    across = covariance(of, at, *scale) @ sums.T
    weights = np.linalg.solve(prior, across.T).T
    surprises = np.array([seconds for _, seconds, _ in known]) - sums @ mean(at, *scale)
    assert found == pytest.approx(np.maximum(mean(of, *scale) + weights @ surprises, 0.02 * scale[0]), rel=1e-6)
    assert covariances == pytest.approx(covariance(of, of, *scale) - weights @ across.T, rel=1e-5, abs=1e-10)


def test_terms_need_places() -> None:
    with pytest.raises(ValueError, match="terms of the places"):
        _C.estimate_prices([(1.0, 0.0, False)], [([(1, 1.0)], 0.01, 1e-8)], (0.01, 0.02), [(1.0, 0.0, False)])


def drained(remaining: list[float], speeds: Array, prices: Array, first: int, then: int, part: float = 5e-3) -> float:
    """Seconds until all have ended, small parts of steps one after the other."""
    left, seconds, num_slots = np.array(remaining), 0.0, len(prices)
    has_turned = False
    while (left > 1e-9).any():
        running = np.flatnonzero(left > 1e-9)[:num_slots]  # first come, first served
        has_turned = has_turned or len(running) <= num_slots // 2
        length = then if has_turned else first
        seconds += part * prices[len(running) - 1, length]
        left[running] -= part * speeds[running, length]
    return seconds


@pytest.mark.parametrize(("number", "num_slots"), [(1, 1), (2, 2), (5, 5), (7, 4), (5, 1)])
def test_the_end_of_a_batch_is_what_its_steps_come_to(number: int, num_slots: int) -> None:
    rng = random.Random(number)
    remaining = [rng.uniform(6, 20) for _ in range(number)]
    reached = np.cumprod([[rng.uniform(0.3, 0.95) for _ in range(2)] for _ in remaining], axis=1)
    speeds = np.cumsum(np.pad(reached, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    sizes = sorted({1, (num_slots + 1) // 2, num_slots})
    seconds = np.array([[1 + 0.2 * n, 1.5 + 0.4 * n, 1.6 + 0.5 * n] for n in sizes])
    prices = np.array([[1 + 0.2 * n, 1.5 + 0.4 * n, 1.6 + 0.5 * n] for n in range(1, num_slots + 1)])
    found = _C.seconds_to_end(remaining, reached, sizes, seconds)
    for first, total in enumerate(found):
        best = min(drained(remaining, speeds, prices, first, then) for then in range(3))
        assert total == pytest.approx(best, rel=5e-3)


def test_each_request_takes_a_step() -> None:
    """Drafts beyond the last token bring nothing."""
    assert _C.seconds_to_end([1, 1], np.full((2, 1), 0.9), [1, 2], np.array([[1.0, 2.0], [3.0, 4.0]])) == [3.0, 4.0]


@pytest.mark.parametrize("sizes", [[], [0], [2], [1, 1]])
def test_the_end_of_a_batch_of_other_shapes_is_refused(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match=r"expected remaining \[N\]"):
        _C.seconds_to_end([3.0], np.full((1, 2), 0.5), sizes, np.ones((1, 3)))
