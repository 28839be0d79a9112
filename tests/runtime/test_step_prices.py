# SPDX-License-Identifier: Apache-2.0
"""Prices of steps: ratios of neighbours, and what they say of other lengths and other numbers of requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dflash_trt.runtime.step_prices import (
    BESIDE,
    BUCKETS,
    DRIFT,
    DRIFT_STEPS,
    LOOK,
    MAX_COMPARISONS,
    Array,
    Place,
    Step,
    StepPrices,
    bucket_of,
)

K = 7


def cost(length: int, batch_size: int = 4) -> float:
    return 1.0 + 0.02 * batch_size * (1 + length) + 0.5 * (length > 0)


def costs(batch_size: int = 4) -> Array:
    return np.array([cost(length, batch_size) for length in range(K + 1)])


def steps(number: int, length: int, batch_size: int = 4, *, slower: float = 1.0, look: bool = False) -> list[Step]:
    seconds = slower * cost(length, batch_size)
    return [Step(Place.of(batch_size, length), seconds, slower * 0.5, look) for _ in range(number)]


def looked_at(present: int, *lengths: int, batch_size: int = 4, number: int = 1) -> StepPrices:
    """Steps of the present length, with looks at others among them."""
    prices = StepPrices(K)
    prices.measure(steps(20, present, batch_size))
    for _ in range(number):
        for length in lengths:
            prices.measure(steps(LOOK, length, batch_size, look=True) + steps(4, present, batch_size))
    return prices


def doubts(prices: StepPrices, batch_size: int = 4) -> Array:
    """Standard deviations as shares of the prices."""
    (seconds,), covariance = prices.estimate(batch_size)
    deviations: Array = np.sqrt(np.diag(covariance)) / seconds
    return deviations


@pytest.mark.parametrize("present", [0, K])
def test_lengths_between_lie_near_the_line_from_a_step_that_drafts(present: int) -> None:
    """Not from plain decoding, which has no drafter in it: here the line is the truth."""
    assert looked_at(present, K - present).estimate(4)[0][0] == pytest.approx(costs(), rel=0.03)


def test_what_was_looked_at_is_surer_and_what_runs_is_sure() -> None:
    prices = looked_at(K, 0, number=3)
    prices.noise = 0.03
    deviations = doubts(prices)
    assert deviations[K] < 0.02
    assert deviations[0] < 0.05
    assert deviations[1:K].max() > deviations[0]
    assert doubts(looked_at(K, 0, 3))[3] < 0.8 * doubts(looked_at(K, 0))[3]
    assert doubts(looked_at(K, 0, number=4))[0] < 0.8 * doubts(looked_at(K, 0))[0]
    assert doubts(prices, batch_size=12)[0] > 2 * deviations[0], "farther away"


def test_a_place_of_its_own_price_keeps_it() -> None:
    """A surface is no line: tiles and experts make steps."""
    prices = looked_at(K, 0, 4)
    for _ in range(5):
        prices.measure(steps(2, 5, slower=1.3, look=True) + steps(4, K))
    prices.noise = 0.02
    assert prices.estimate(4)[0][0][[4, 5]] == pytest.approx([cost(4), 1.3 * cost(5)], rel=0.06)


@pytest.mark.parametrize("slower", [0.6, 1.9])
def test_a_slow_moment_makes_what_is_looked_at_in_it_no_dearer(slower: float) -> None:
    """It is compared with the steps before and behind it."""
    prices = looked_at(K, 0)
    prices.measure(steps(3, K, slower=slower) + steps(2, 0, slower=slower, look=True) + steps(3, K, slower=slower))
    prices.measure(steps(12, K))
    assert prices.estimate(4)[0][0] == pytest.approx(costs(), rel=0.03)


def test_a_machine_that_becomes_slower_makes_what_is_looked_at_no_dearer() -> None:
    """What follows it counts as much as what was before."""
    prices = StepPrices(K)
    for now in np.geomspace(1.0, 2.0, 6):
        before, there, behind = (now * factor for factor in (1, 1.1, 1.2))
        prices.measure(
            steps(20, K, slower=before) + steps(LOOK, 0, slower=there, look=True) + steps(9, K, slower=behind)
        )
    (seconds,), _ = prices.estimate(4)
    assert seconds[0] / seconds[K] == pytest.approx(cost(0) / cost(K), rel=0.03)


def test_a_slower_minute_makes_all_of_it_slower() -> None:
    prices = looked_at(K, 0)
    prices.measure(steps(12, K, slower=1.4))
    assert prices.estimate(4)[0][0] == pytest.approx(1.4 * costs(), rel=0.03)


def test_one_outlier_beside_a_look_or_in_it_does_not_count() -> None:
    prices = StepPrices(K)
    for slow in range(2 * BESIDE + LOOK):
        around = [*steps(18, K), *steps(LOOK, 0, look=True), *steps(BESIDE, K)]
        around[18 - BESIDE + slow] = around[18 - BESIDE + slow]._replace(seconds=10.0)
        prices.measure(around)
    assert prices.estimate(4)[0][0] == pytest.approx(costs(), rel=0.03)


def test_the_last_comparisons_count() -> None:
    """Contexts grow, and tokens get dearer."""
    prices = looked_at(K, 0, number=20)
    for _ in range(3):
        prices.measure(steps(2, 0, slower=0.8, look=True) + steps(4, K))
    assert prices.estimate(4)[0][0][[0, K]] == pytest.approx([0.8 * cost(0), cost(K)], rel=0.03)


def test_cold_steps_are_forgotten_as_soon_as_there_are_others() -> None:
    prices = StepPrices(K)
    prices.measure(steps(8, K) + steps(2, 0, slower=1.6, look=True) + steps(4, K))
    assert prices.estimate(4)[0][0][0] == pytest.approx(1.6 * cost(0), rel=0.03)
    prices.measure(steps(8, K) + steps(LOOK, 0, look=True) + steps(4, K))
    assert prices.estimate(4)[0][0][0] == pytest.approx(cost(0), rel=0.03)


def test_a_switch_compares_too() -> None:
    prices = StepPrices(K)
    prices.measure(steps(20, K) + steps(8, 0))
    assert prices.estimate(4)[0][0][[0, K]] == pytest.approx([cost(0), cost(K)], rel=0.03)


def test_what_becomes_another_altogether_makes_all_else_forgotten() -> None:
    prices = looked_at(K, 0)
    prices.measure(steps(2 * DRIFT_STEPS, K, slower=0.9 * DRIFT))
    assert prices.knows(4, 0)
    prices.measure(steps(2 * DRIFT_STEPS, K, slower=1.1 * DRIFT))
    assert prices.knows(4, K)
    assert not prices.knows(4, 0)


def test_old_comparisons_are_less_sure() -> None:
    prices = looked_at(K, 0, number=4)
    before = doubts(prices)
    prices.measure(steps(1000, K))
    prices.noise = 0.1
    after = doubts(prices)
    assert after[0] > 1.3 * before[0]
    assert after[K] == pytest.approx(before[K], rel=0.1), "it ran all the time"


def test_other_numbers_of_requests_tell_of_each_other() -> None:
    prices = looked_at(K, 0, 3, batch_size=8)
    prices.measure(steps(20, K, 16))
    for length in (0, 3):
        prices.measure(steps(2, length, 16, look=True) + steps(4, K, 16))
    for batch_size in (6, 12, 24):
        assert prices.estimate(batch_size)[0][0] == pytest.approx(costs(batch_size), rel=0.12)
    assert prices.knows(64, 0)
    assert not prices.knows(96, 0), "far from all of them"


@pytest.mark.parametrize("present", [0, K])
def test_blocks_that_take_ten_times_as_long_say_little_of_plain_steps(present: int) -> None:
    """On a mixture of experts: with three quarters of the requests they take no longer, whichever runs."""

    def dear(number: int, length: int, *, look: bool = False) -> list[Step]:
        return [Step(Place.of(32, length), 0.01 + 0.09 * length / K, 0.001, look) for _ in range(number)]

    prices = StepPrices(K)
    prices.measure(dear(20, present) + dear(LOOK, K - present, look=True) + dear(4, present))
    (seconds,), covariance = prices.estimate(24)
    assert 0.0075 < seconds[0] < 0.0101
    assert 0.075 < seconds[K] < 0.101
    assert np.sqrt(covariance[0, 0]) < 0.3 * seconds[0]


def test_it_remembers_no_more_than_it_can_use() -> None:
    """Servers run for months, at every number of requests."""
    prices = StepPrices(K)
    for batch_size in (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4):
        prices.measure(steps(10, K, batch_size))
        for length in range(K):
            prices.measure(steps(LOOK, length, batch_size, look=True) + steps(BESIDE, K, batch_size))
    assert len(prices._comparisons) == MAX_COMPARISONS
    assert prices.estimate(4)[0][0] == pytest.approx(costs(), rel=0.05)
    assert prices.knows(64, 3)
    assert not prices.knows(256, 3)


@pytest.mark.parametrize("deviation", [0.01, 0.04, 0.1])
def test_it_finds_out_how_far_a_look_is_wrong(deviation: float) -> None:
    """From looks at what runs anyway, and the steps beside them."""
    rng, prices = random.Random(0), StepPrices(K)
    prices.measure([step._replace(seconds=step.seconds * rng.lognormvariate(0, deviation)) for step in steps(1000, K)])
    prices.measure(steps(2, 0, look=True))
    prices.estimate(4)
    assert prices.noise == pytest.approx(max(0.02, deviation * np.sqrt(1 / LOOK + 1 / (2 * BESIDE))), rel=0.35)


def test_buckets_reach_up_to_the_next() -> None:
    assert [bucket_of(size) for size in (1, 5, 6, 31, 32, 10_000)] == [1, 4, 6, 24, 32, BUCKETS[-1]]
