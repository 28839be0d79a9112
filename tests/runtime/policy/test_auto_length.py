# SPDX-License-Identifier: Apache-2.0
"""Lengths that auto settles on with synthetic costs, and its response to surprises."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from dflash_trt.runtime.policy.auto_length import MAX_PROBE_STEPS, REPLAN_STEPS, AutoLength
from dflash_trt.runtime.policy.draft_length import LengthByBatch
from dflash_trt.runtime.policy.step_record import StepRecord

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
    paces: Iterator[float] | None = None,
) -> list[int]:
    """The lengths it chooses where steps take `cost` at a machine's paces, 10 % more or less."""
    lengths = []
    for _ in range(steps):
        length = policy.choose(batch)
        assert 0 <= length <= K
        held = [next((i for i in range(length) if rng.random() >= acceptance[i]), length) for _ in range(batch)]
        seconds = next(paces or STEADY) * rng.uniform(0.9, 1.1) * cost(batch, length)
        policy.observe(record([length] * batch, held, seconds))
        lengths.append(length)
    return lengths


def record(
    proposed: Sequence[int], accepted: Sequence[int], seconds: float, *, num_prompt_tokens: int = 0
) -> StepRecord:
    return StepRecord(proposed=proposed, accepted=accepted, num_prompt_tokens=num_prompt_tokens, seconds=seconds)


def virtual_machine(rng: random.Random) -> Iterator[float]:
    """Pace of a machine by step: it wanders by 6 %, and 3 to 25 steps at a time take up to twice as long."""
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


@pytest.mark.parametrize("batch", [4, *(pytest.param(batch, marks=pytest.mark.full) for batch in (1, 32))])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("acceptance", [HIGH, MIDDLING, NOTHING], ids=["high", "middling", "nothing"])
def test_it_settles_near_the_best(acceptance: Sequence[float], cost: Cost, batch: int) -> None:
    """From step 64 on, probes included, and at most 5 % below the better of plain decoding and whole blocks."""
    better = max(speed(acceptance, cost, batch, length) for length in (0, K))
    best = max(speed(acceptance, cost, batch, length) for length in range(K + 1))
    shares = []
    for seed in range(3):
        lengths = simulate(AutoLength(K), acceptance, cost, batch=batch, steps=1200, rng=random.Random(seed))
        shares.append(share_of_best(lengths[64:], acceptance, cost, batch))
    assert min(shares) > max(0.88, 0.94 * better / best)
    assert sum(shares) / 3 > max(0.9, 0.95 * better / best)


@pytest.mark.parametrize(
    ("acceptance", "cost"),
    [
        (HIGH, Cost(1.0, lambda batch, length: max(8.0, 0.08 * batch * (1 + length)))),
        (MIDDLING, Cost(0.5, lambda batch, length: 2 + 0.3 * batch + min(30.0, 0.25 * batch * length))),
    ],
    ids=["memory, then arithmetic", "all experts"],
)
def test_requests_may_come_and_go(acceptance: Sequence[float], cost: Cost) -> None:
    """Each of six buckets of batch sizes has its own costs, which the first 1500 steps or so must measure.

    From then on it is 7 % below the better end at most: probes, and batch sizes of one bucket that differ by two.
    """
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        seconds, better = [0.0, 0.0], [0.0, 0.0]
        for number in range(150):
            batch = rng.randint(1, 48)
            ends = max(speed(acceptance, cost, batch, length) for length in (0, K))
            for length in simulate(policy, acceptance, cost, batch=batch, steps=rng.randint(1, 40), rng=rng):
                took = cost(batch, length)
                seconds[number >= 75] += took
                better[number >= 75] += took * speed(acceptance, cost, batch, length) / ends
        assert better[0] / seconds[0] > 0.7
        assert better[1] / seconds[1] > 0.93


@pytest.mark.parametrize(
    ("acceptance", "kind", "batch"), [(HIGH, "a dear drafter", 1), (MIDDLING, "dear tokens", 16)], ids=["one", "many"]
)
def test_slow_moments_of_the_machine_mislead_it_little(acceptance: Sequence[float], kind: str, batch: int) -> None:
    """All steps of a probe may be one of them, and so may the first steps of what has just been chosen."""
    cost = COSTS[kind]
    better = max(speed(acceptance, cost, batch, length) for length in (0, K))
    best = max(speed(acceptance, cost, batch, length) for length in range(K + 1))
    for seed in range(3):
        policy, rng, paces = AutoLength(K), random.Random(seed), virtual_machine(random.Random(seed))
        lengths = simulate(policy, acceptance, cost, batch=batch, steps=1500, rng=rng, paces=paces)
        assert share_of_best(lengths[64:], acceptance, cost, batch) * best / better > 0.93


@pytest.mark.parametrize(("before", "after"), [(0.01, 3.0), (3.0, 0.01)], ids=["tokens dearer", "tokens cheaper"])
def test_it_follows_prices(before: float, after: float) -> None:
    for seed in range(3):
        policy, rng = AutoLength(K), random.Random(seed)
        simulate(policy, MIDDLING, linear(0.1, before), batch=4, steps=600, rng=rng)
        lengths = simulate(policy, MIDDLING, linear(0.1, after), batch=4, steps=4000, rng=rng)
        assert share_of_best(lengths[2000:], MIDDLING, linear(0.1, after), 4) > 0.93


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
    lengths = simulate(policy, HIGH, COSTS["dear tokens"], batch=1, steps=64, rng=random.Random(0))
    first = lengths.index(0)
    assert lengths[:first] == [K] * REPLAN_STEPS
    assert lengths[first : first + 11] == [*[0] * 10, K], "six cold steps and four measured ones"
    assert policy.explain().startswith("7 of 7: ")
    assert "tokens/s at 1 request, " in policy.explain()


def test_a_probe_ends_where_every_step_reads_prompts() -> None:
    """Such steps show no cost; and where there are no others, nothing is probed."""
    policy = AutoLength(K)
    lengths = simulate(policy, NOTHING, COSTS["dear tokens"], batch=4, steps=REPLAN_STEPS + 1, rng=random.Random(0))
    assert lengths[-1] == 0
    for _ in range(200):
        lengths.append(policy.choose(4))
        policy.observe(record([lengths[-1]] * 4, [0] * 4, 1e-3, num_prompt_tokens=100))
    assert lengths.count(0) == MAX_PROBE_STEPS
    assert lengths[-1] == K


def test_steps_that_read_few_prompt_tokens_are_measured() -> None:
    """At large batches nearly every step reads the prompt of a request that has just come."""
    policy = AutoLength(K)
    for _ in range(64):
        length = policy.choose(16)
        seconds = COSTS["dear tokens"](16, length)
        policy.observe(record([length] * 16, [0] * 16, seconds, num_prompt_tokens=2))
    assert policy.explain().startswith("0 of 7: ")
    assert policy.choose(16) == 0


def test_requests_that_cap_their_drafts_are_measured_as_what_they_verify() -> None:
    """All verify two drafts at most: steps of other lengths are not, and what two cost is no whole block's cost."""
    policy = AutoLength(K)
    for _ in range(300):
        length = min(2, policy.choose(1))
        policy.observe(record([length], [length], linear(0.2, 0.05)(1, length)))
    assert policy.explain() == "7 of 7: not measured yet"


def test_a_new_batch_size_begins_with_the_best_length_of_the_nearest() -> None:
    """Whole blocks at 1 request, which has not been measured yet, and no drafts at 64."""
    policy, rng, cost = AutoLength(K), random.Random(0), linear(2.0, 0.5)
    simulate(policy, NOTHING, cost, batch=1, steps=REPLAN_STEPS, rng=rng)
    simulate(policy, NOTHING, cost, batch=64, steps=200, rng=rng)
    for batch, length in ((16, 0), (128, 0), (2, K)):
        assert simulate(policy, NOTHING, cost, batch=batch, steps=REPLAN_STEPS, rng=rng) == [length] * REPLAN_STEPS


def test_a_drafter_that_knows_cuts_each_request() -> None:
    """Half of the requests accept all, half nothing, and the drafter says so: steps verify what is worth it, and what
    lengths cost and bring is learned from whole ones.
    """
    policy, cost, batch = AutoLength(K), linear(1.0, 0.05), 8
    sure, hopeless = [0.95**k for k in range(1, K + 1)], [0.05**k for k in range(1, K + 1)]
    cuts, whole = 0, 0
    for _ in range(400):
        length = policy.choose(batch)
        survival = [[sure, hopeless][i % 2][:length] for i in range(batch)]
        proposed = [policy.cut_length(row) for row in survival]
        accepted = [min(count, K * (1 - i % 2)) for i, count in enumerate(proposed)]
        policy.observe(record(proposed, accepted, cost(1, sum(proposed) + batch - 1)))
        if length and proposed != [length] * batch:
            cuts += 1
            assert proposed[1] == 0 < proposed[0] == length
        whole += proposed == [length] * batch
    assert cuts > 120
    assert whole > 100
    whole_block = float(policy.explain().split(", ")[-1].split()[0])
    expected = batch * (1 + K / 2) / cost(1, batch * (K + 1) - 1)
    assert whole_block == pytest.approx(expected, rel=0.02), "learned from cut blocks, too, whose drafts are sure ones"


def test_a_drafter_that_does_not_know_is_not_cut() -> None:
    assert AutoLength(K).cut_length([1e-9] * K) == K  # nothing is measured yet
    assert LengthByBatch({1: K}).cut_length([1e-9] * K) == K
