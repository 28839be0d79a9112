# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step verifies: what people may write, and where the adaptive policy settles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.runtime.draft_length import (
    DEFAULT_TOKEN_COST,
    MIN_PASSES,
    PROBE_EVERY,
    AdaptiveLength,
    DraftLength,
    FixedLength,
    LengthByBatch,
    parse_draft_length,
)

K = 7
BATCH_SIZES = (1, 2, 7, 8, 31, 32, 1000)
FALLING = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Acceptance of each position, given that all before it were accepted."""
PROFILES = {
    "falling": FALLING,
    "high": (0.95,) * K,
    "middling": (0.8,) * K,
    "low": (0.3,) * K,
    "nothing": (0.0,) * K,
    "cliff": (0.95, 0.95, 0.95, 0.05, 0.05, 0.05, 0.05),
    "late": (0.3, *(0.9,) * (K - 1)),
}


def simulate(
    policy: DraftLength, acceptance: Sequence[float], *, batch_size: int, num_passes: int, rng: random.Random
) -> list[int]:
    """The lengths that the policy chooses while drafts hold with the given probabilities."""
    lengths = []
    for _ in range(num_passes):
        length = policy.choose(range(batch_size))[0]
        for _ in range(batch_size):
            accepted = 0
            while accepted < length and rng.random() < acceptance[accepted]:
                accepted += 1
            policy.observe([0], [length], [accepted])
        lengths.append(length)
    return lengths


def tokens_per_cost(acceptance: Sequence[float], length: int, batch_size: int, token_cost: float) -> float:
    tokens, reached = 1.0, 1.0
    for share in acceptance[:length]:
        reached *= share
        tokens += reached
    return tokens / (1 + length * batch_size * token_cost)


def settled(lengths: Sequence[int]) -> list[int]:
    """The second half, probes left out."""
    return [length for i, length in enumerate(lengths, start=1) if i % PROBE_EVERY and i > len(lengths) // 2]


@pytest.mark.parametrize("length", [0, 1, K])
def test_a_number_is_the_length_at_every_batch_size(length: int) -> None:
    policy = parse_draft_length(str(length), K)
    assert isinstance(policy, FixedLength)
    policy.observe([0], [length], [0])
    assert [policy.choose(range(batch_size))[0] for batch_size in BATCH_SIZES] == [length] * len(BATCH_SIZES)


@pytest.mark.parametrize("text", ["1:7,8:3,32:0", "32:0,1:7,8:3"])
def test_a_schedule_holds_from_its_batch_sizes_on(text: str) -> None:
    policy = parse_draft_length(text, K)
    assert isinstance(policy, LengthByBatch)
    policy.observe([0], [7], [0])
    assert [policy.choose(range(batch_size))[0] for batch_size in BATCH_SIZES] == [7, 7, 7, 3, 3, 0, 0]


def test_a_schedule_may_have_one_entry() -> None:
    assert parse_draft_length("1:4", K).choose(range(100)) == [4] * 100


@pytest.mark.parametrize(
    ("text", "token_cost"), [("adaptive", DEFAULT_TOKEN_COST), ("adaptive:0.3", 0.3), ("adaptive:0", 0.0)]
)
def test_adaptive_takes_a_token_cost(text: str, token_cost: float) -> None:
    parsed, made = parse_draft_length(text, K), AdaptiveLength(K, token_cost)
    assert isinstance(parsed, AdaptiveLength)
    chosen = [
        simulate(policy, FALLING, batch_size=2, num_passes=200, rng=random.Random(1)) for policy in (parsed, made)
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "-1", "8", "1.5", "7,3", "all"),
        *("2:7", "0:7,1:3", "1:7,8:8", "1:7,8:-1", "1:7,1:3", "1:7:3", "1:7,", "1:", ":7", "1:7,8", "x:3"),
        *("adaptive:x", "adaptive:-0.1", "adaptive:inf", "adaptive:nan", "adaptive:0.1:2", "adaptive,1:7", "Adaptive"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refusal:
        parse_draft_length(text, K)
    assert str(refusal.value) == (
        "draft length: expected 0 to 7, a schedule by batch size that begins at 1 (1:7,8:3), adaptive or auto,"
        f" found {text!r}"
    )


@pytest.mark.parametrize("token_cost", [0.05, 0.2])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("acceptance", PROFILES.values(), ids=PROFILES)
def test_adaptive_settles_near_the_best_length(acceptance: Sequence[float], batch_size: int, token_cost: float) -> None:
    best = max(tokens_per_cost(acceptance, length, batch_size, token_cost) for length in range(1, K + 1))
    for seed in range(3):
        policy, rng = AdaptiveLength(K, token_cost), random.Random(seed)
        chosen = settled(simulate(policy, acceptance, batch_size=batch_size, num_passes=600, rng=rng))
        reached = [tokens_per_cost(acceptance, length, batch_size, token_cost) for length in chosen]
        assert sum(reached) / len(reached) > 0.93 * best


@pytest.mark.parametrize("acceptance", PROFILES.values(), ids=PROFILES)
def test_adaptive_does_not_flap(acceptance: Sequence[float]) -> None:
    for seed in range(3):
        lengths = simulate(AdaptiveLength(K), acceptance, batch_size=4, num_passes=2000, rng=random.Random(seed))
        chosen = settled(lengths)
        assert sum(a != b for a, b in pairwise(chosen)) <= 10, "of 1000 passes"


def test_adaptive_keeps_a_length_for_a_while() -> None:
    """Even where acceptance changes wildly."""
    policy, rng, lengths = AdaptiveLength(K), random.Random(0), list[int]()
    for period in range(60):
        acceptance = PROFILES["high" if period % 2 else "nothing"]
        lengths += simulate(policy, acceptance, batch_size=8, num_passes=50, rng=rng)
    plain = [(i, length) for i, length in enumerate(lengths, start=1) if i % PROBE_EVERY]
    switches = [i for (_, before), (i, after) in pairwise(plain) if before != after]
    assert len(switches) > 5, "nothing to see"
    assert min(b - a for a, b in pairwise(switches)) >= MIN_PASSES


def test_adaptive_begins_with_the_whole_block_and_looks_at_it_again() -> None:
    lengths = simulate(AdaptiveLength(K), PROFILES["nothing"], batch_size=1, num_passes=1000, rng=random.Random(0))
    assert lengths[: MIN_PASSES - 1] == [K] * (MIN_PASSES - 1)
    probes = [i for i, length in enumerate(lengths, start=1) if length == K and i > MIN_PASSES]
    assert probes == list(range(PROBE_EVERY, 1001, PROBE_EVERY))
    assert set(settled(lengths)) == {1}, "one draft at least, to go on learning"


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("before", ["nothing", "low", "cliff"])
def test_adaptive_recovers_when_acceptance_rises(before: str, batch_size: int) -> None:
    """Probes find it out, though shorter drafts judge no late position."""
    for seed in range(3):
        policy, rng = AdaptiveLength(K), random.Random(seed)
        low = settled(simulate(policy, PROFILES[before], batch_size=batch_size, num_passes=600, rng=rng))[-1]
        high = settled(simulate(policy, PROFILES["high"], batch_size=batch_size, num_passes=2000, rng=rng))[-1]
        assert low <= 4
        assert high >= 6


def test_adaptive_shortens_when_acceptance_falls() -> None:
    policy, rng = AdaptiveLength(K), random.Random(0)
    assert settled(simulate(policy, PROFILES["high"], batch_size=1, num_passes=300, rng=rng))[-1] == K
    assert settled(simulate(policy, PROFILES["low"], batch_size=1, num_passes=200, rng=rng))[-1] <= 3


@pytest.mark.parametrize("acceptance", PROFILES.values(), ids=PROFILES)
def test_adaptive_is_not_longer_at_a_higher_batch_size(acceptance: Sequence[float]) -> None:
    policy, rng = AdaptiveLength(K), random.Random(0)
    simulate(policy, acceptance, batch_size=4, num_passes=300, rng=rng)
    chosen = []
    for batch_size in (1, 2, 4, 8, 16, 32, 64):  # the same measurements for all: nothing is observed
        chosen.append(settled([policy.choose(range(batch_size))[0] for _ in range(4 * PROBE_EVERY)])[-1])
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1


def test_drafts_that_no_request_had_room_for_are_not_judged() -> None:
    """A request near its limit verifies fewer drafts than chosen; that says nothing about those left out."""
    policy, other = AdaptiveLength(K), AdaptiveLength(K)
    for _ in range(300):
        for each in (policy, other):
            each.choose([0])
            each.observe([0], [K], [K])
        policy.observe([0], [2], [2])
        policy.observe([0], [0], [0])
    assert policy.choose([0]) == other.choose([0]) == [K]
