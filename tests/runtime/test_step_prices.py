# SPDX-License-Identifier: Apache-2.0
"""Prices of steps: medians of one pace, and what they say of other lengths and other numbers of requests."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.runtime.step_prices import BUCKETS, DRIFT, WINDOW, Array, StepPrices, bucket_of

K = 7


def cost(length: int, batch_size: int = 4) -> float:
    return 1.0 + 0.02 * batch_size * (1 + length) + 0.5 * (length > 0)


def costs(batch_size: int = 4) -> Array:
    return np.array([cost(length, batch_size) for length in range(K + 1)])


def measured(*lengths: int, batch_size: int = 4) -> StepPrices:
    prices = StepPrices(K)
    run(prices, *lengths, batch_size=batch_size)
    return prices


def run(
    prices: StepPrices, *lengths: int, batch_size: int = 4, steps: int = WINDOW, slower: float = 1.0, look: bool = False
) -> None:
    for length in lengths:
        for _ in range(steps):
            prices.measure(batch_size, length, slower * cost(length, batch_size), slower * 0.5, is_look=look)


def doubts(prices: StepPrices, batch_size: int = 4) -> Array:
    """Standard deviations as shares of the prices."""
    (seconds,), covariance = prices.estimate(batch_size)
    deviations: Array = np.sqrt(np.diag(covariance)) / seconds
    return deviations


def test_lengths_between_lie_near_the_line_from_a_step_that_drafts() -> None:
    """Not from plain decoding, which has no drafter in it: here the line is the truth."""
    assert measured(0, K).estimate(4)[0][0] == pytest.approx(costs(), rel=0.02)


def test_what_was_measured_is_sure_and_the_rest_less_so() -> None:
    deviations = doubts(measured(0, K))
    assert deviations[[0, K]].max() < 0.06
    assert deviations[1:K].min() > deviations[[0, K]].max()
    assert doubts(measured(0, 3, K))[3] < 0.7 * deviations[3]
    assert doubts(measured(0, K), batch_size=16).min() > deviations.max(), "farther away"


def test_a_place_of_its_own_price_keeps_it() -> None:
    """A surface is no line: tiles and experts make steps."""
    prices = measured(0, 4, K)
    for _ in range(WINDOW):
        prices.measure(4, 5, 1.3 * cost(5), 0.5, is_look=True)
    assert prices.estimate(4)[0][0][[4, 5]] == pytest.approx([cost(4), 1.3 * cost(5)], rel=0.05)


def test_outliers_do_not_count() -> None:
    prices = measured(0, K)
    for _ in range(WINDOW // 2):
        prices.measure(4, 0, 10 * cost(0), 0.0, is_look=True)
    assert prices.estimate(4)[0][0] == pytest.approx(costs(), rel=0.02)


@pytest.mark.parametrize("slower", [0.75, 1.4])
def test_a_slower_minute_makes_what_runs_in_it_no_dearer(slower: float) -> None:
    prices = measured(0, K)
    run(prices, K, slower=slower)
    assert prices.pace == pytest.approx(slower)
    run(prices, 3, slower=slower, steps=2, look=True)
    assert prices.estimate(4)[0][0] == pytest.approx(slower * costs(), rel=0.03)


def test_what_runs_for_long_costs_what_it_costs_then() -> None:
    """A look begins with cold caches."""
    prices = measured(K)
    run(prices, 0, slower=1.4, look=True)
    run(prices, 0, steps=3 * WINDOW)
    assert prices.pace == pytest.approx(1.0)
    assert prices.estimate(4)[0][0][[0, K]] == pytest.approx([cost(0), cost(K)], rel=0.03)


def test_a_look_does_not_say_how_fast_the_machine_is() -> None:
    prices = measured(0, 3, K)
    run(prices, 3, slower=1.4, look=True)
    assert prices.pace == pytest.approx(1.0)


def test_a_price_that_is_another_altogether_makes_others_forgotten() -> None:
    prices = measured(0, K)
    run(prices, K, slower=1.1 * DRIFT)
    assert prices.knows(4, K)
    assert not prices.knows(4, 0)
    assert prices.pace == 1.0


def test_old_prices_are_less_sure() -> None:
    prices = measured(0, K)
    before = doubts(prices)
    run(prices, K, steps=1000)
    after = doubts(prices)
    assert after[0] > 1.5 * before[0]
    assert after[K] == pytest.approx(before[K], rel=0.5), "it ran all the time"


def test_other_numbers_of_requests_tell_of_each_other() -> None:
    prices = measured(0, 3, K, batch_size=8)
    run(prices, 0, 3, K, batch_size=16)
    for batch_size in (6, 12, 24):
        assert prices.estimate(batch_size)[0][0] == pytest.approx(costs(batch_size), rel=0.08)
    assert prices.knows(64, 0)
    assert not prices.knows(96, 0), "far from all of them"


def test_buckets_reach_up_to_the_next() -> None:
    assert [bucket_of(size) for size in (1, 5, 6, 31, 32, 10_000)] == [1, 4, 6, 24, 32, BUCKETS[-1]]
