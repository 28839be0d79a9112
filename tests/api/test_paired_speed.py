# SPDX-License-Identifier: Apache-2.0
"""Verdicts on simulated servers whose speed-up is known, on quiet and on busy machines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash_trt.api.paired_speed import MIN_PAIRS, Pair, PairedSpeed, Timing, paired_speed, take_turns

TOKENS = 100
NUM_QUESTIONS = 8
SECONDS = 150.0


class Machine:
    """A clock that both servers share: answers take `noise` longer or shorter, and all of them `drift` in mid-run."""

    def __init__(self, truth: float, noise: float, drift: float, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._noise, self._drift = noise, drift
        spread = self._generator.permutation(np.linspace(-0.2, 0.2, NUM_QUESTIONS))
        self._passes = {"plain": np.ones(NUM_QUESTIONS), "dflash": (1 + spread) / truth}
        self._slow_from = self._generator.uniform(0.2, 0.8) * SECONDS
        self.now = 0.0

    def answer(self, method: str, question: int) -> Timing:
        sigma = np.log1p(self._noise)
        seconds = self._passes[method][question] * np.exp(self._generator.normal(0, sigma))
        seconds *= self._drift if self.now > self._slow_from else 1
        self.now += seconds
        return Timing(TOKENS, seconds)


def measured(truth: float, noise: float, drift: float, seed: int) -> PairedSpeed:
    """One measurement; drafts cost half of what they could bring."""
    machine = Machine(truth, noise, drift, seed)
    pairs = take_turns(
        lambda question: machine.answer("plain", question), lambda question: machine.answer("dflash", question),
        NUM_QUESTIONS, SECONDS, lambda: 1.5 * truth, seed=seed, clock=lambda: machine.now,
    )  # fmt: skip
    return paired_speed(pairs, 1.5 * truth)


def side(truth: float) -> str:
    return {0.7: "slower", 1.0: "as fast"}.get(truth, "faster")


def check(num_runs: int, noises: list[float], drifts: list[float]) -> None:
    """Intervals hold the truth in 95 % of runs; at most 2 % are firm and wrong, within three standard errors."""
    held, wrong, given = [], [], []
    for truth, noise, drift in itertools.product([0.7, 1.0, 1.3, 2.5], noises, drifts):
        for run in range(num_runs):
            speed = measured(truth, noise, drift, run)
            given.append(not speed.withheld)
            if speed.withheld:
                continue
            assert speed.high <= 1.5 * truth
            held.append(speed.low <= truth <= speed.high)
            wrong.append(speed.outcome != side(truth))
    count = len(held)
    assert np.mean(held) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / count), np.mean(held)
    assert np.mean(wrong) <= 0.02 + 3 * np.sqrt(0.02 * 0.98 / count), np.mean(wrong)
    assert np.mean(given) > 0.3


def test_intervals_hold_the_truth() -> None:
    check(12, [0.0, 0.3], [3.0])


@pytest.mark.full
@pytest.mark.parametrize("drift", [1.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3, 0.6])
def test_intervals_hold_the_truth_in_many_runs(noise: float, drift: float) -> None:
    check(200, [noise], [drift])


def pairs(*ratios: float) -> list[Pair]:
    return [Pair(Timing(TOKENS, 1.0), Timing(TOKENS, 1 / ratio)) for ratio in ratios]


def test_a_quiet_machine() -> None:
    speed = paired_speed(pairs(*[2.0] * 16), 2.5)
    assert speed.outcome == "faster"
    assert speed.sentence == "faster: 2.00x to 2.00x the speed of plain decoding (95 % interval, 16 pairs)"
    assert paired_speed(pairs(*[1.0] * 16), None).sentence.startswith("about as fast: 1.00x to 1.00x")
    assert paired_speed(pairs(*[0.5] * 16), None).sentence.startswith("slower: 0.50x to 0.50x")


def test_what_cannot_be_is_no_result() -> None:
    speed = paired_speed(pairs(*[7.85] * 32), 3.31)
    assert speed.outcome == "not known"
    assert speed.sentence == (
        "this machine is too busy to tell: 32 pairs, from 7.85x to 7.85x, together 7.85x, above the acceptance length"
        " of 3.31, which cannot be"
    )


def test_an_interval_ends_at_the_acceptance_length() -> None:
    speed = paired_speed(pairs(*[2.3, 2.9] * 16), 2.64)
    assert speed.outcome == "faster"
    assert speed.high == 2.64


def test_pairs_that_disagree_are_no_result() -> None:
    speed = paired_speed(pairs(*[0.6, 1.9] * 8), 3.0)
    assert "16 pairs, from 0.60x to 1.90x" in speed.withheld
    assert "they disagree" in speed.withheld
    wide = paired_speed(pairs(*[1.2, *[9.0] * 3, 1.2] * 4), 12.0)
    assert wide.low > 1
    assert "they disagree" in wide.withheld
    nearly_same = paired_speed(pairs(*[0.9, 1.65] * 8), 3.0)
    assert 1 < nearly_same.low < 1.02
    assert nearly_same.high > 1.4
    assert "they disagree" in nearly_same.withheld


def test_threads_that_wait_for_a_core_make_no_result() -> None:
    """All pairs agree, but on a machine with other work."""

    def waiting(share: float) -> PairedSpeed:
        timing = Timing(TOKENS, 1.0, 1.0 - share, share)
        return paired_speed([Pair(timing, timing)] * 16, None)

    assert waiting(0.1).outcome == "as fast"
    assert waiting(0.5).outcome == "not known"
    assert waiting(0.5).withheld.endswith("but threads waited for a core in 50% of the time they could run")


def test_few_pairs_are_no_result() -> None:
    assert paired_speed(pairs(*[2.0] * (MIN_PAIRS - 1)), None).withheld.startswith(
        "15 pairs are too few to compare speeds"
    )


def test_turns_are_in_random_order() -> None:
    asked: list[tuple[str, int]] = []

    def answer(method: str, question: int) -> Timing:
        asked.append((method, question))
        return Timing(TOKENS, 1.0 if method == "plain" else 0.5)

    found = take_turns(
        lambda question: answer("plain", question), lambda question: answer("dflash", question), 5, 60, lambda: 3.0
    )  # fmt: skip
    assert len(found) == MIN_PAIRS
    turns = list(zip(asked[::2], asked[1::2], strict=True))
    assert [first[1] for first, _ in turns] == [second[1] for _, second in turns] == [i % 5 for i in range(MIN_PAIRS)]
    assert {first[0] for first, _ in turns} == {"plain", "dflash"}


def test_processor_time_adds_up() -> None:
    assert Timing(1, 1.0, 0.5, 0.1) + Timing(2, 2.0, 0.5, 0.2) == Timing(3, 3.0, 1.0, pytest.approx(0.3))
    assert (Timing(1, 1.0, None) + Timing(2, 2.0, 0.5)).cpu_seconds is None
