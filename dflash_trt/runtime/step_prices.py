# SPDX-License-Identifier: Apache-2.0
"""What steps cost here, by running requests and drafts verified of each, next to steps right beside them.

A machine has faster and slower minutes, and slow moments; contexts grow. What a step took says little by itself, and
much beside what the steps before and behind it took. So what is kept are ratios of neighbours, and the seconds of what
runs now; what they say of other steps is `_C.estimate_prices`.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_trt import _C

Array = npt.NDArray[np.float64]

LOOK = 2
"""Steps of a look that are measured, behind a cold one."""
BESIDE = 3
"""Steps on each side of it that it is compared with."""
LOOK_WIDTH = BESIDE + 1 + LOOK + 1 + BESIDE
"""All that, with the cold step that begins it and the one behind it."""
OUTLIER = 1.3
"""Of two times in the middle of all, the longer one does not count when it is so many times the other."""
KEPT = 5
"""Comparisons of the same two places whose median counts."""
MAX_COMPARISONS = 64
"""Pairs of places that are remembered; the one that was compared longest ago goes first."""
NOISE, NOISE_LOOKS, LEAST_NOISE = 0.05, 4, 0.02
"""Standard deviation of what a comparison says, as a share, until so many have shown it; and what it is at least."""
AGEING = 0.1 / math.sqrt(1000)
"""The same of one that was not made again, by the root of the steps since."""
COLD_STEPS = 16
"""That warm caches up: a comparison of them does not count when there is a later one."""
DRIFT, DRIFT_STEPS = 2.2, 15
"""Steps that take so many times as long, or as short, as the first of their length: all else is forgotten."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of running requests that have prices of their own, each up to the next."""
NEAR = 4.0
"""Buckets within this factor tell of each other's prices."""
SURE = 0.01
"""Standard deviation, as a share, of what runs now."""


class Place(NamedTuple):
    """What has a price."""

    bucket: int
    length: int
    """Drafts verified of each request, on average."""
    is_drafting: bool

    @staticmethod
    @cache
    def of(batch_size: int, length: int) -> Place:
        """A step's."""
        return Place(bucket_of(batch_size), length, length > 0)


class Step(NamedTuple):
    """What one took."""

    place: Place
    seconds: float
    draft_seconds: float
    is_look: bool
    """Whether other steps run another length."""


@dataclass
class _Comparison:
    """Of two places: by what factor the one takes longer."""

    logs: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seconds: float = 0.0
    """What the one took, about."""
    step: int = 0
    """At which they were compared last."""


class StepPrices:
    """Prices of steps of length 0 .. K."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._comparisons: dict[tuple[Place, Place], _Comparison] = {}
        self._drafting: dict[int, tuple[Place, deque[float]]] = {}
        """By bucket: the drafter's share of last steps of a length, which without it are of length 0."""
        self._recent: deque[Step] = deque(maxlen=LOOK_WIDTH)
        """Steps that were no looks."""
        self._num_here = 0
        """Of them, those since another length or number of requests began."""
        self._last_seconds: deque[float] = deque(maxlen=DRIFT_STEPS)
        self._first_seconds = 0.0
        """Median of the first of them."""
        self._deviations: deque[float] = deque(maxlen=4 * NOISE_LOOKS)
        self.noise = NOISE
        """Standard deviation of what a comparison says, as a share."""
        self._step = 0

    def measure(self, steps: Sequence[Step]) -> None:
        """Notes what steps took, in their order; each look as a whole, with `BESIDE` steps behind it."""
        runs = [list(run) for _, run in groupby(steps, key=lambda step: step.is_look)]
        for run, after in zip_longest(runs, runs[1:]):
            if run[0].is_look:
                self._step += len(run)
                self._compare(run, [*list(self._recent)[-BESIDE:], *(after or [])[:BESIDE]])
                self._note_drafting(run[-1])
            else:
                for step in run:
                    self._measure(step)

    def _measure(self, step: Step) -> None:
        """One that was no look."""
        self._step += 1
        if not self._recent or self._recent[-1].place != step.place:
            self._num_here = 0
        self._num_here += 1
        self._recent.append(step)
        self._last_seconds.append(step.seconds)
        if self._num_here == BESIDE:
            last = list(self._recent)
            self._compare(last[-BESIDE:], last[-2 * BESIDE : -BESIDE])
            self._note_drafting(step)
        if self._num_here % LOOK_WIDTH == 0:
            self._look_at_what_runs()
            self._note_drafting(step)
        if self._num_here % DRIFT_STEPS == 0:
            self._follow()

    def _compare(self, steps: Sequence[Step], beside: Sequence[Step]) -> None:
        """Those of one place with those of another, as far as they are of one."""
        if not beside or (other := beside[0].place) == (place := steps[0].place):
            return
        seconds = _median(step.seconds for step in steps if step.place == place)
        log = math.log(seconds / _median(step.seconds for step in beside if step.place == other))
        if place < other:  # so that one comparison says it both ways
            place, other, log, seconds = other, place, -log, seconds / math.exp(log)
        comparison = self._comparisons.setdefault((place, other), _Comparison())
        if comparison.step <= COLD_STEPS < self._step:
            comparison.logs.clear()
        comparison.logs.append(log)
        comparison.seconds, comparison.step = seconds, self._step
        if len(self._comparisons) > MAX_COMPARISONS:
            del self._comparisons[min(self._comparisons, key=lambda pair: self._comparisons[pair].step)]

    def _note_drafting(self, step: Step) -> None:
        if step.place.is_drafting:
            place, shares = self._drafting.get(step.place.bucket, (None, deque[float]()))
            if place != step.place:
                shares = deque(maxlen=KEPT)
                self._drafting[step.place.bucket] = step.place, shares
            shares.append(step.draft_seconds / step.seconds)

    def _look_at_what_runs(self) -> None:
        """What a look at the last steps would have said, had they been one."""
        seconds = [step.seconds for step in self._recent]
        look = _median(seconds[BESIDE + 1 : BESIDE + 1 + LOOK])
        beside = _median(seconds[:BESIDE] + seconds[-BESIDE:])
        self._deviations.append(abs(math.log(look / beside)))

    def _follow(self) -> None:
        """Forgets all but what runs now, when that has become another altogether."""
        seconds = statistics.median(self._last_seconds)
        if self._num_here == DRIFT_STEPS:
            self._first_seconds = seconds
        elif not 1 / DRIFT < seconds / self._first_seconds < DRIFT:
            self._comparisons.clear()
            self._drafting.clear()
            self._num_here = 0

    def knows(self, bucket: int, length: int) -> bool:
        """Whether a bucket nearby has had a step of this length."""
        return any(place.length == length and _is_near(place.bucket, bucket) for place in self._places())

    def _places(self) -> set[Place]:
        found = {place for pair in self._comparisons for place in pair}
        if self._recent:
            found.add(self._recent[-1].place)
        return found

    def _nearest(self, bucket: int, length: int) -> Place:
        """Of those that had steps of this length."""
        found = (place for place in self._places() if place.length == length)
        return min(found, key=lambda place: abs(math.log(place.bucket / bucket)))

    def estimate(self, bucket: int, shares: Sequence[float] = (1.0,)) -> tuple[Array, Array]:
        """Seconds [S, K + 1] of steps over these shares of the bucket's requests by length 0 .. K, as it runs now.

        And the covariance [K + 1, K + 1] of those over the last share. Lengths 0 and K must be known: what has had
        steps of them says at which scale all others are.
        """
        K = self._num_draft_tokens
        if len(self._deviations) >= NOISE_LOOKS:
            self.noise = max(LEAST_NOISE, 1.48 * statistics.median(self._deviations))  # a normal distribution's
        now = self._recent[-1].place
        seconds = _median(step.seconds for step in self._recent if step.place == now)
        places: dict[Place, int] = {}

        def term(place: Place, weight: float) -> tuple[int, float]:
            return places.setdefault(place, len(places)), weight

        known = [([term(now, 1.0)], seconds, (SURE * seconds) ** 2)]
        for (place, other), comparison in self._comparisons.items():
            if _is_near(place.bucket, bucket) and _is_near(other.bucket, bucket):
                ratio = math.exp(_median(comparison.logs))
                share = self.noise**2 / len(comparison.logs) + AGEING**2 * (self._step - comparison.step)
                known.append(([term(place, 1.0), term(other, -ratio)], 0.0, share * comparison.seconds**2))
        for place, found in self._drafting.values():
            plain = Place(place.bucket, 0, False)
            if place in places and plain in places:
                terms = [term(Place(place.bucket, 0, True), 1.0), term(plain, -1.0), term(place, -_median(found))]
                known.append((terms, 0.0, (self.noise * seconds) ** 2 / len(found)))

        def row(place: Place) -> tuple[float, float, bool]:
            return place.bucket / bucket, place.length / K, place.is_drafting

        rows = [row(place) for place in places]
        ends = [row(self._nearest(bucket, length)) for length in (0, K)]
        (without, whole), _ = _C.estimate_prices(rows, known, (seconds, seconds), ends)
        asked = [(share, length / K, length > 0) for share in shares for length in range(K + 1)]
        prices, covariance = _C.estimate_prices(rows, known, (without, whole), asked)
        last = slice(-K - 1, None)
        return np.array(prices).reshape(len(shares), -1), covariance[last, last]


def _median(values: Iterable[float]) -> float:
    """Between the two in the middle, or the lower one where the other is an outlier."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if high > OUTLIER * low > 0 else (low + high) / 2


def _is_near(bucket: int, other: int) -> bool:
    return 1 / NEAR <= bucket / other <= NEAR


def bucket_of(batch_size: int) -> int:
    """The largest of `BUCKETS` that is not above it."""
    return BUCKETS[bisect_right(BUCKETS, batch_size) - 1]
