# SPDX-License-Identifier: Apache-2.0
"""Prices of steps: medians of one pace, lent between neighbouring numbers of requests."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.step_prices import BUCKETS, MIN_SAMPLES, WINDOW, StepPrices, bucket_of

K = 7


def cost(length: int) -> float:
    return 1.0 + 0.1 * length + 0.5 * (length > 0)


def measured(*lengths: int, batch_size: int = 4, steps: int = WINDOW) -> StepPrices:
    prices = StepPrices(K)
    run(prices, *lengths, batch_size=batch_size, steps=steps)
    return prices


def run(
    prices: StepPrices, *lengths: int, batch_size: int = 4, steps: int = WINDOW, slower: float = 1.0, look: bool = False
) -> None:
    for length in lengths:
        for _ in range(steps):
            prices.measure(batch_size, length, slower * cost(length), slower * 0.5, is_look=look)


def test_a_price_takes_two_steps() -> None:
    prices = measured(K, steps=MIN_SAMPLES - 1)
    assert prices.known(4, K) == 0
    run(prices, K, steps=1)
    assert prices.known(4, K) == cost(K)
    assert not prices.has_ends(4)


def test_lengths_between_lie_on_the_line_from_a_step_that_drafts() -> None:
    """Not from plain decoding, which has no drafter in it: here the line is the truth."""
    assert measured(0, K).by_length(4) == pytest.approx([cost(length) for length in range(K + 1)])


@pytest.mark.parametrize("slower", [0.75, 1.4])
def test_a_slower_minute_makes_what_runs_in_it_no_dearer(slower: float) -> None:
    prices = measured(0, K)
    run(prices, K, slower=slower)
    assert prices.pace == pytest.approx(slower)
    run(prices, 3, slower=slower, steps=MIN_SAMPLES, look=True)
    assert prices.by_length(4) == pytest.approx([cost(length) for length in range(K + 1)])


def test_a_look_does_not_say_how_fast_the_machine_is() -> None:
    prices = measured(0, 3, K)
    run(prices, 3, slower=1.4, look=True)
    assert prices.pace == pytest.approx(1.0)


def test_a_price_that_is_another_altogether_makes_others_forgotten() -> None:
    prices = measured(0, K)
    run(prices, K, slower=2.0)
    assert prices.known(4, K) == pytest.approx(2.0 * cost(K))
    assert prices.known(4, 0) == 0
    assert prices.pace == 1.0


def test_neighbours_lend_prices_and_others_do_not() -> None:
    prices = measured(0, K, batch_size=8)
    assert prices.by_length(6) == prices.by_length(8)
    assert prices.has_ends(16)
    assert not prices.has_ends(24)
    run(prices, K, batch_size=16, slower=1.2)
    assert prices.known(16, 0) == pytest.approx(1.2 * cost(0)), "by the ratio to what both have"


def test_buckets_reach_up_to_the_next() -> None:
    assert [bucket_of(size) for size in (1, 5, 6, 31, 32, 10_000)] == [1, 4, 6, 24, 32, BUCKETS[-1]]
