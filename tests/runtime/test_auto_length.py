# SPDX-License-Identifier: Apache-2.0
"""The draft length by measured prices: what it settles on over synthetic costs, and how it bears surprises."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from dflash_trt.runtime.auto_length import AutoLength

K = 7


class Cost(NamedTuple):
    """Milliseconds of a step, by requests and length."""

    draft: float
    target: Callable[[int, int], float]

    def __call__(self, batch: int, length: int) -> float:
        """Seconds."""
        return 1e-3 * (self.draft * (length > 0) + self.target(batch, length))


STEADY = itertools.repeat(1.0)
HIGH, MIDDLING, NOTHING = (0.9,) * K, (0.6,) * K, (0.0,) * K


def linear(draft: float, token: float) -> Cost:
    """A pass of 1 ms + `token` ms for each token of each request, and `draft` ms for drafting."""
    return Cost(draft, lambda batch, length: 1 + token * batch * (1 + length))


COSTS = {
    "idle arithmetic": linear(0.2, 0.001),
    "a dear drafter": linear(2.0, 0.01),
    "dear tokens": linear(0.3, 0.2),
    "a step at 4": Cost(0.2, lambda batch, length: 1 + 2 * (length > 4)),
}


def simulate(
    policy: AutoLength,
    acceptance: Sequence[float],
    cost: Cost,
    *,
    batch: int,
    steps: int,
    rng: random.Random,
    outliers: float = 0.0,
    paces: Iterator[float] | None = None,
) -> list[int]:
    """The lengths it chooses where steps take `cost` at a machine's paces, 10 % more or less.

    Some `outliers` take ten times that.
    """
    lengths = []
    for _ in range(steps):
        chosen = policy.choose(range(batch))
        held = [next((i for i in range(length) if rng.random() >= acceptance[i]), length) for length in chosen]
        policy.observe(range(batch), chosen, held)
        mean = round(sum(chosen) / batch)
        assert all(0 <= length <= K for length in chosen)
        factor = next(paces or STEADY) * (10.0 if rng.random() < outliers else rng.uniform(0.9, 1.1))
        policy.measure(batch, mean, factor * cost(batch, mean), factor * 1e-3 * cost.draft)
        lengths.append(mean)
    return lengths


def virtual_machine(rng: random.Random) -> Iterator[float]:
    """Its pace by step: it wanders by 6 %, and for 3 to 25 steps at a time everything takes up to twice as long."""
    drift, slow, factor = 0.0, 0, 1.0
    while True:
        drift = 0.97 * drift + rng.gauss(0, 0.06 * math.sqrt(1 - 0.97**2))
        if slow == 0 and rng.random() < 1 / 150:
            slow, factor = rng.randint(3, 25), rng.uniform(1.2, 1.9)
        slow = max(0, slow - 1)
        yield math.exp(drift) * (factor if slow else 1.0)


def speed(acceptance: Sequence[float], cost: Cost, batch: int, length: int) -> float:
    tokens, reached = 1.0, 1.0
    for share in acceptance[:length]:
        reached *= share
        tokens += reached
    return batch * tokens / cost(batch, length)


def share_of_best(lengths: Sequence[int], acceptance: Sequence[float], cost: Cost, batch: int) -> float:
    """Tokens a second over these steps, next to the best fixed length's."""
    seconds = sum(cost(batch, length) for length in lengths)
    tokens = sum(speed(acceptance, cost, batch, length) * cost(batch, length) for length in lengths)
    return tokens / seconds / max(speed(acceptance, cost, batch, length) for length in range(K + 1))


@pytest.mark.parametrize("batch", [1, 4, *(pytest.param(batch, marks=pytest.mark.full) for batch in (16, 32))])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("acceptance", [HIGH, MIDDLING, NOTHING], ids=["high", "middling", "nothing"])
def test_it_settles_near_the_best(acceptance: Sequence[float], cost: Cost, batch: int) -> None:
    """Looks at other lengths included; steps cost what they cost, so that this is what a user gets."""
    shares = []
    for seed in range(3):
        lengths = simulate(AutoLength(K), acceptance, cost, batch=batch, steps=1200, rng=random.Random(seed))
        shares.append(share_of_best(lengths[64:], acceptance, cost, batch))
    assert min(shares) > 0.9
    assert sum(shares) / 3 > 0.92


@pytest.mark.parametrize("batch", [2, *(pytest.param(batch, marks=pytest.mark.full) for batch in (1, 8, 32))])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("acceptance", [HIGH, MIDDLING, NOTHING], ids=["high", "middling", "nothing"])
def test_it_is_never_far_below_plain_and_full(acceptance: Sequence[float], cost: Cost, batch: int) -> None:
    """From step 64 on, looks included: at most 3 %."""
    better = max(speed(acceptance, cost, batch, length) for length in (0, K))
    best = max(speed(acceptance, cost, batch, length) for length in range(K + 1))
    shares = []
    for seed in range(3):
        lengths = simulate(AutoLength(K), acceptance, cost, batch=batch, steps=1200, rng=random.Random(seed))
        shares.append(share_of_best(lengths[64:], acceptance, cost, batch) * best / better)
    assert min(shares) > 0.96
    assert sum(shares) / 3 > 0.97


@pytest.mark.parametrize(
    "cost",
    [
        Cost(1.0, lambda batch, length: max(8.0, 0.08 * batch * (1 + length))),
        Cost(0.5, lambda batch, length: 2 + 0.3 * batch + min(30.0, 0.25 * batch * length)),
    ],
    ids=["memory, then arithmetic", "all experts"],
)
@pytest.mark.parametrize("acceptance", [HIGH, MIDDLING], ids=["high", "middling"])
def test_requests_may_come_and_go(acceptance: Sequence[float], cost: Cost) -> None:
    """What is known at one number of requests says enough of others."""
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        seconds = better = 0.0
        for number in range(150):
            batch = rng.randint(1, 48)
            lengths = simulate(policy, acceptance, cost, batch=batch, steps=rng.randint(1, 40), rng=rng)
            if number >= 3:
                ends = max(speed(acceptance, cost, batch, length) for length in (0, K))
                took = [cost(batch, length) for length in lengths]
                seconds += sum(took)
                better += sum(
                    speed(acceptance, cost, batch, length) / ends * each
                    for length, each in zip(lengths, took, strict=True)
                )
        assert better / seconds > 0.96


def test_another_number_of_requests_is_thought_of_at_once() -> None:
    """Drafts pay at 2 requests and not at 48, where it would decide for 256 steps."""
    for seed in range(3):
        policy, rng, cost = AutoLength(K), random.Random(seed), linear(0.1, 0.1)
        simulate(policy, MIDDLING, cost, batch=2, steps=300, rng=rng)
        for _ in range(3):
            many = simulate(policy, MIDDLING, cost, batch=48, steps=300, rng=rng)
            few = simulate(policy, MIDDLING, cost, batch=2, steps=150, rng=rng)
            assert many[30:].count(0) > 200
            assert 0 not in few[:8]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("cost", [COSTS["a dear drafter"], COSTS["dear tokens"]], ids=["a dear drafter", "dear tokens"])
@pytest.mark.parametrize("acceptance", [HIGH, MIDDLING], ids=["high", "middling"])
def test_slow_moments_of_the_machine_mislead_it_little(acceptance: Sequence[float], cost: Cost, batch: int) -> None:
    """All that a look sees may be one of them, and so may the first steps of what has just been chosen."""
    better = max(speed(acceptance, cost, batch, length) for length in (0, K))
    best = max(speed(acceptance, cost, batch, length) for length in range(K + 1))
    for seed in range(3):
        policy, rng, paces = AutoLength(K), random.Random(seed), virtual_machine(random.Random(seed))
        lengths = simulate(policy, acceptance, cost, batch=batch, steps=1500, rng=rng, paces=paces)
        assert share_of_best(lengths[64:], acceptance, cost, batch) * best / better > 0.97


def slow_at_first(policy: AutoLength, length: int, factor: float) -> Iterator[float]:
    """Steps of a length take `factor` times as long until the policy has looked at both ends."""
    while True:
        yield factor if policy._next == length and "not measured" in policy.explain() else 1.0


@pytest.mark.parametrize("factor", [1.4, 2.0])
def test_a_first_look_in_a_slow_moment_is_made_good(factor: float) -> None:
    """Without drafts it is a quarter faster than with whole blocks, and nothing between them is better than those."""
    acceptance, cost = (0.75,) * K, Cost(2.5, lambda _, length: 1 + length / K)
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        paces = slow_at_first(policy, 0, factor)
        lengths = simulate(policy, acceptance, cost, batch=16, steps=1000, rng=rng, paces=paces)
        assert lengths[100:].count(0) > 860


def test_what_the_first_look_was_compared_with_in_a_slow_moment_is_made_good() -> None:
    """Whole blocks are 1.6 times as fast as no drafts, but all steps beside the look take three times as long."""
    acceptance, cost = (0.85,) * K, Cost(1.5, lambda _, length: 1 + 0.5 * length / K)
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        paces = slow_at_first(policy, K, 3.0)
        lengths = simulate(policy, acceptance, cost, batch=16, steps=1500, rng=rng, paces=paces)
        assert lengths[30:200].count(0) > 150
        assert sum(length >= K - 1 for length in lengths[900:]) > 500


def warming_up(policy: AutoLength) -> Iterator[float]:
    """Shorter steps than before begin by 30 % slower, and lose three tenths of that with each, as measured on a CPU."""
    before, excess = K, 0.0
    while True:
        excess = 0.3 if policy._next < before else 0.7 * excess * (policy._next == before)
        before = policy._next
        yield 1 + excess


def test_what_longer_steps_left_behind_does_not_count() -> None:
    """Steady, plain decoding is 12 % faster than whole blocks; its first steps behind them are as slow as those."""
    acceptance, cost = (0.75,) * K, Cost(2.1, lambda _, length: 1 + length / K)
    assert speed(acceptance, cost, 8, K) * 1.12 == pytest.approx(speed(acceptance, cost, 8, 0), rel=0.02)
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        lengths = simulate(policy, acceptance, cost, batch=8, steps=600, rng=rng, paces=warming_up(policy))
        assert lengths[64:].count(0) > 450


def test_the_better_end_is_seen_again_and_again() -> None:
    """However bad it looked: what it is measured against may have changed."""
    lengths = simulate(AutoLength(K), HIGH, COSTS["a step at 4"], batch=4, steps=4000, rng=random.Random(0))
    assert lengths[100:].count(4) > 3600
    assert all(K in lengths[begin : begin + 1200] for begin in range(100, 2801, 100))


def test_requests_whose_drafts_hold_get_more() -> None:
    """Half of them hold always, half never; one length for all would take 7 drafts, or none, of each."""
    policy, rng, batch = AutoLength(K), random.Random(0), 8
    cost = linear(0.1, 0.1)
    for _ in range(400):
        chosen = policy.choose(range(batch))
        policy.observe(range(batch), chosen, [length if slot % 2 else 0 for slot, length in enumerate(chosen)])
        mean = round(sum(chosen) / batch)
        policy.measure(batch, mean, rng.uniform(0.95, 1.05) * cost(batch, mean), 1e-3 * cost.draft)
    assert chosen == [1, K] * 4


def test_drafts_are_shared_out_anew_between_thoughts() -> None:
    """Two requests are followed by others, and it is the other one's drafts that hold."""
    policy, batch, cost = AutoLength(K), 8, linear(0.1, 0.1)
    worthless, since = {0, 2, 4, 6}, 0
    for step in range(600):
        if step > 300 and not since and policy._left == 60:
            for slot in (0, 1):
                policy.release(slot)
            worthless, since = {1, 2, 4, 6}, step
        chosen = policy.choose(range(batch))
        policy.observe(range(batch), chosen, [0 if slot in worthless else length for slot, length in enumerate(chosen)])
        mean = round(sum(chosen) / batch)
        policy.measure(batch, mean, cost(batch, mean), 1e-3 * cost.draft)
        if since and step == since + 30:
            break
    assert policy._left == 60 - 31, "it has not thought since"
    assert chosen == [K, 1, 1, K, 1, K, 1, K]


def test_the_next_request_of_a_slot_is_a_new_one() -> None:
    policy, cost = AutoLength(K), linear(0.1, 0.1)
    for _ in range(401):
        chosen = policy.choose([0, 1])
        policy.observe([0, 1], chosen, [0, chosen[1]])
        policy.measure(2, sum(chosen) // 2, cost(2, sum(chosen) // 2), 1e-3 * cost.draft)
    assert chosen == [1, K]
    policy.release(0)
    known_to_none = policy.choose([0, 9])
    assert known_to_none[0] == known_to_none[1]


@pytest.mark.parametrize("outliers", [0.05, 0.15])
def test_outliers_do_not_move_it(outliers: float) -> None:
    for seed in range(5):
        policy, rng = AutoLength(K), random.Random(seed)
        lengths = simulate(policy, HIGH, COSTS["idle arithmetic"], batch=1, steps=1500, rng=rng, outliers=outliers)
        assert sum(length >= 5 for length in lengths[500:]) > 850


@pytest.mark.parametrize(("before", "after"), [(0.01, 3.0), (3.0, 0.01)], ids=["tokens dearer", "tokens cheaper"])
def test_it_follows_prices(before: float, after: float) -> None:
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        simulate(policy, MIDDLING, linear(0.1, before), batch=4, steps=600, rng=rng)
        lengths = simulate(policy, MIDDLING, linear(0.1, after), batch=4, steps=4000, rng=rng)
        assert share_of_best(lengths[2000:], MIDDLING, linear(0.1, after), 4) > 0.93


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_machine_that_is_faster_or_slower_as_a_whole_changes_little(factor: float) -> None:
    cost = COSTS["idle arithmetic"]
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        simulate(policy, HIGH, cost, batch=1, steps=600, rng=rng)
        lengths = simulate(
            policy,
            HIGH,
            Cost(factor * cost.draft, lambda b, k: factor * cost.target(b, k)),
            batch=1,
            steps=600,
            rng=rng,
        )
        assert share_of_best(lengths[100:], HIGH, cost, 1) > 0.93


def test_it_follows_acceptance() -> None:
    policy, rng, cost = AutoLength(K), random.Random(0), COSTS["dear tokens"]
    low = simulate(policy, NOTHING, cost, batch=8, steps=400, rng=rng)
    assert set(low[300:]) <= {0, 1, K}
    assert low[300:].count(0) > 90
    high = simulate(policy, HIGH, linear(0.1, 0.01), batch=8, steps=3000, rng=rng)
    assert sum(length >= 5 for length in high[2000:]) > 900


def test_it_begins_with_both_ends_and_says_what_it_found() -> None:
    policy = AutoLength(K)
    assert policy.explain() == "7 of 7: not measured yet"
    lengths = simulate(policy, HIGH, COSTS["idle arithmetic"], batch=1, steps=32, rng=random.Random(0))
    assert lengths[:31] == [*[K] * 24, 0, 0, 0, K, K, K, K], "what the look took shows beside what follows it"
    assert policy.explain().split(": ")[0] == f"{policy._length} of 7"
    assert "tokens/s at 1 request, " in policy.explain()


def test_the_first_step_of_a_length_is_not_measured() -> None:
    """It warms caches up."""
    policy, rng, cost = AutoLength(K), random.Random(0), COSTS["idle arithmetic"]
    simulate(policy, HIGH, cost, batch=4, steps=14, rng=rng)
    assert [(length, is_look) for _, length, (_, _, is_look) in policy._steps] == [*[(0, True)] * 2, *[(K, False)] * 2]


def test_a_batch_size_nearby_is_not_looked_at_again() -> None:
    policy, rng, cost = AutoLength(K), random.Random(0), COSTS["idle arithmetic"]
    simulate(policy, HIGH, cost, batch=16, steps=40, rng=rng)
    assert 0 not in simulate(policy, HIGH, cost, batch=12, steps=30, rng=rng)
    assert 0 in simulate(policy, HIGH, cost, batch=1, steps=30, rng=rng), "far from what is known"
