# SPDX-License-Identifier: Apache-2.0
"""The speed of DFlash over plain decoding, from pairs of answers that were timed in turns.

The interval is a bootstrap over pairs. Its ends are those of 99 %: it is looked at after every round and the
measurement stops once it is narrow, so it holds the truth less often than 99 %, and in simulation more than 95 %.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

MIN_PAIRS = 16
ROUND = 8
"""Pairs between two looks at the interval."""
NARROW = 1.10
"""High end over low end of an interval that is narrow enough to stop."""
WIDE = 2.0
"""Beyond this ratio of its ends an interval is no result."""
SAME = 0.02
"""A speed within 2 % of plain decoding's is called neither faster nor slower."""
MOST_WAITING = 1 / 3
"""Beyond this share of the time in which they could have run, threads that waited for a core make no result.

Much other work slows the two ways of decoding by different factors, so even a narrow interval is that of this hour.
"""
NUM_SAMPLES = 1000
ENDS = (0.5, 99.5)
TOO_BUSY = "this machine is too busy to tell"
Outcome = Literal["faster", "slower", "as fast", "not known"]


class Timing(msgspec.Struct, frozen=True):
    tokens: Annotated[int, msgspec.Meta(gt=0, le=10**9)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    cpu_seconds: float | None = None
    """Processor time of the server in these seconds; None where it is not on this machine's CPU."""

    waiting_seconds: float = 0.0
    """Time for which threads of the server were ready to run and had no core."""

    def __add__(self, other: Timing) -> Timing:
        cpu = None if None in (self.cpu_seconds, other.cpu_seconds) else self.cpu_seconds + other.cpu_seconds  # type: ignore[operator]
        waiting = self.waiting_seconds + other.waiting_seconds
        return Timing(self.tokens + other.tokens, self.seconds + other.seconds, cpu, waiting)


class Pair(msgspec.Struct, frozen=True):
    """One question, answered both ways, one right after the other."""

    plain: Timing
    dflash: Timing


class PairedSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second with DFlash over those of plain decoding."""

    num_pairs: int
    ratio: float
    low: float
    high: float
    """Ends of the 95 % interval; `high` is at most the acceptance length."""
    acceptance_length: float | None
    """Upper bound over plain decoding: a verify pass costs at least as much as one for a token. None if not known."""
    slowest: float
    fastest: float
    """Ratios of single pairs."""
    waiting: float = 0.0
    """Share of the time in which the servers' threads could have run, for which they had no core."""
    other: str = "plain decoding"
    """Title of what DFlash is compared with."""

    @property
    def is_narrow(self) -> bool:
        """Whether more pairs would add little."""
        return self.num_pairs >= MIN_PAIRS and self.high <= self.low * NARROW

    @property
    def withheld(self) -> str:
        """Why there is no result; "" if there is one."""
        seen = f"{self.num_pairs} pairs, from {self.slowest:.2f}x to {self.fastest:.2f}x, together {self.ratio:.2f}x"
        if self.num_pairs < MIN_PAIRS:
            return f"{self.num_pairs} pairs are too few to compare speeds, {MIN_PAIRS} are needed: is the machine idle?"
        if self.acceptance_length is not None and self.ratio > self.acceptance_length:
            return f"{TOO_BUSY}: {seen}, above the acceptance length of {self.acceptance_length:.2f}, which cannot be"
        if self.waiting > MOST_WAITING:
            return f"{TOO_BUSY}: {seen}, but threads waited for a core in {self.waiting:.0%} of the time they could run"
        could_be_same = self.low <= 1 + SAME and self.high >= 1 - SAME
        if self.high > self.low * WIDE or (could_be_same and not self.is_narrow):
            return f"{TOO_BUSY}: {seen}, and they disagree (95 % interval {self.low:.2f}x to {self.high:.2f}x)"
        return ""

    @property
    def outcome(self) -> Outcome:
        """The verdict, which the interval alone decides."""
        if self.withheld:
            return "not known"
        if self.low > 1 + SAME:
            return "faster"
        return "slower" if self.high < 1 - SAME else "as fast"

    @property
    def interval(self) -> str:
        return f"{self.low:.2f}x to {self.high:.2f}x the speed of {self.other}"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.withheld:
            return self.withheld
        heads = {"faster": "faster", "slower": "slower", "as fast": "about as fast"}
        return f"{heads[self.outcome]}: {self.interval} (95 % interval, {self.num_pairs} pairs)"


def paired_speed(
    pairs: Sequence[Pair], acceptance_length: float | None, seed: int = 0, other: str = "plain decoding"
) -> PairedSpeed:
    """The verdict over at least one pair, each with tokens and seconds above 0."""
    plain, dflash = (
        np.array([(timing.tokens, timing.seconds) for timing in timings], dtype=float)
        for timings in ([pair.plain for pair in pairs], [pair.dflash for pair in pairs])
    )
    chosen = np.random.default_rng(seed).integers(len(pairs), size=(NUM_SAMPLES, len(pairs)))
    low, high = np.percentile(_rate(dflash[chosen]) / _rate(plain[chosen]), ENDS)
    ratio = float(_rate(dflash) / _rate(plain))
    single = dflash[:, 0] / dflash[:, 1] / (plain[:, 0] / plain[:, 1])
    if acceptance_length is not None and ratio <= acceptance_length:
        high = min(high, acceptance_length)
    return PairedSpeed(
        num_pairs=len(pairs), ratio=ratio, low=float(low), high=float(high), acceptance_length=acceptance_length,
        slowest=float(single.min()), fastest=float(single.max()), waiting=_waiting(pairs), other=other,
    )  # fmt: skip


def _waiting(pairs: Sequence[Pair]) -> float:
    timings = [timing for pair in pairs for timing in (pair.plain, pair.dflash)]
    waited = sum(timing.waiting_seconds for timing in timings)
    used = sum(timing.cpu_seconds or 0.0 for timing in timings)
    return waited / (waited + used) if waited else 0.0


def _rate(timings: np.ndarray) -> np.ndarray:
    """Tokens over seconds of timings [..., pairs, 2]."""
    sums = timings.sum(axis=-2)
    return np.asarray(sums[..., 0] / sums[..., 1])


def take_turns(
    plain: Callable[[int], Timing], dflash: Callable[[int], Timing], num_questions: int, seconds: float,
    acceptance_length: Callable[[], float | None], *, seed: int = 0, clock: Callable[[], float] = time.monotonic,
) -> list[Pair]:  # fmt: skip
    """Pairs of answers to question 0, 1, ... and again from the first, until the interval is narrow or time is up.

    Both ways answer each question in random order; they should be warm. At least one pair is returned.
    """
    order = random.Random(seed)  # noqa: S311  # not for secrets
    deadline = clock() + seconds
    pairs: list[Pair] = []
    while not pairs or clock() < deadline:
        question = len(pairs) % num_questions
        if order.random() < 0.5:
            pairs.append(Pair(plain=plain(question), dflash=dflash(question)))
        else:
            drafted = dflash(question)
            pairs.append(Pair(plain=plain(question), dflash=drafted))
        if len(pairs) % ROUND == 0 and paired_speed(pairs, acceptance_length()).is_narrow:
            break
    return pairs
