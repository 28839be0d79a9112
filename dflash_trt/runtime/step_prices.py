# SPDX-License-Identifier: Apache-2.0
"""What steps have cost here: medians of measured times, by running requests and drafts verified of each.

What some steps took says what others will: `_C.estimate_prices`.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dflash_trt import _C

Array = npt.NDArray[np.float64]

WINDOW = 31
"""Steps whose lower median is a price: fifteen outliers among them move nothing."""
PACE_STEPS = 15
"""Steps whose median says how fast the machine is now."""
DRIFT = 2.2
"""A pace that moves by this factor says that costs have changed: prices of what did not run since are forgotten."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of running requests that have prices of their own, each up to the next."""
NEAR = 4.0
"""Buckets within this factor tell of each other's prices."""
NOISE, NOISE_STEPS, LEAST_NOISE = 0.1, 32, 0.02
"""Standard deviation of one step's time, as a share, until so many steps have shown it; and what it is at least."""
DRAFTING_STEPS = 4
"""Steps from one whose drafter's part is noted to the next."""
COLD_STEPS = 16
"""That warm caches up, so that what they took counts as one step, and no more when there is a later one."""
AGEING = 0.1 / math.sqrt(1000)
"""The same of a price that was not measured anew, by the root of the steps since."""
_DRAFTING = -1
"""In the place of a length: the drafter's part of a step, which is the same for all of them."""


@dataclass
class _Price:
    """Of one bucket and length."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    step: int = 0
    """At which it was measured last."""
    num_steady: int = 0
    """Of the last samples, those of steps among others of the same length: a look begins with cold caches."""
    _median: float | None = None

    @property
    def seconds(self) -> float:
        """Their lower median."""
        if self._median is None:
            self._median = statistics.median_low(self.samples)
        return self._median

    def add(self, seconds: float, step: int) -> None:
        if self.step <= COLD_STEPS < step:
            self.samples.clear()
        self.samples.append(seconds)
        self.step, self._median = step, None


class StepPrices:
    """Seconds of a step by bucket and length 0 .. K.

    A machine has faster and slower minutes, and contexts grow. So that what runs now does not look dear beside what ran
    in a better minute, all prices are of one pace: the price of what runs now stays as its first `WINDOW` steps made
    it, what it takes beside that is the pace, and a look's seconds are divided by it.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._prices: dict[tuple[int, int], _Price] = {}
        self._ratios: deque[float] = deque(maxlen=PACE_STEPS)
        self._pace: float | None = 1.0
        self._deviations: deque[float] = deque(maxlen=2 * NOISE_STEPS)
        self.noise = NOISE
        """Standard deviation of one step's time, as a share."""
        self._step = 0
        self._last: tuple[tuple[int, int], float] = (0, 0), 0.0
        """The last step's place, and its seconds."""

    @property
    def pace(self) -> float:
        """What steps take now beside their prices."""
        if self._pace is None:
            self._pace = statistics.median(self._ratios)
        return self._pace

    def measure(
        self, batch_size: int, length: int, seconds: float, draft_seconds: float, is_look: bool = False
    ) -> None:
        """Notes what a step over `batch_size` requests took that verified `length` drafts of each, on average.

        `is_look` where other steps run another length.
        """
        bucket = bucket_of(batch_size)
        price = self._prices.setdefault((bucket, length), _Price())
        self._step += 1
        if (bucket, length) == self._last[0]:
            self._deviations.append(abs(math.log(seconds / self._last[1])))
        self._last = (bucket, length), seconds
        if not is_look and price.num_steady == WINDOW:
            price.step = self._step
            ratio = seconds / price.seconds
            self._ratios.append(ratio)
            self._pace = None
            has_moved = not 1 / DRIFT < ratio < DRIFT
            if has_moved and len(self._ratios) == PACE_STEPS and not 1 / DRIFT < self.pace < DRIFT:
                self._forget(price, (bucket, length))
        else:
            price.add(seconds / self.pace, self._step)
            price.num_steady = 0 if is_look else price.num_steady + 1
        if length > 0 and (is_look or self._step % DRAFTING_STEPS == 0 or (bucket, _DRAFTING) not in self._prices):
            self._prices.setdefault((bucket, _DRAFTING), _Price()).add(draft_seconds / self.pace, self._step)

    def knows(self, bucket: int, length: int) -> bool:
        """Whether a bucket nearby has had a step of this length."""
        return any(k == length and _is_near(b, bucket) for b, k in self._prices)

    def estimate(self, bucket: int, shares: Sequence[float] = (1.0,)) -> tuple[Array, Array]:
        """Seconds [S, K + 1] of steps over these shares of the bucket's requests by length 0 .. K, at this pace.

        And the covariance [K + 1, K + 1] of those over the last share. Lengths 0 and K must be known.
        """
        K = self._num_draft_tokens
        if len(self._deviations) >= NOISE_STEPS:
            self.noise = max(LEAST_NOISE, 1.05 * statistics.median(self._deviations))  # of two steps' difference
        known = []
        for (b, length), price in self._prices.items():
            if not _is_near(b, bucket):
                continue
            if length != _DRAFTING:
                known.append((b / bucket, length / K, length > 0, price.seconds, self._variance(price)))
            elif (plain := self._prices.get((b, 0))) is not None:
                variance = self._variance(price) + self._variance(plain)
                known.append((b / bucket, 0.0, True, price.seconds + plain.seconds, variance))
        asked = [(share, length / K, length > 0) for share in shares for length in range(K + 1)]
        seconds, covariance = _C.estimate_prices(known, asked)
        last = slice(-K - 1, None)
        return np.array(seconds).reshape(len(shares), -1) * self.pace, covariance[last, last] * self.pace**2

    def _variance(self, price: _Price) -> float:
        """Of a median, and of what may have changed since."""
        num_samples = 1 if price.step <= COLD_STEPS else len(price.samples)
        share = self.noise**2 * math.pi / 2 / num_samples + AGEING**2 * (self._step - price.step)
        return share * price.seconds**2

    def _forget(self, price: _Price, what: tuple[int, int]) -> None:
        """All but what runs now, at its present price."""
        kept = _Price()
        for _ in range(2):
            kept.add(price.seconds * self.pace, self._step)
        self._prices = {what: kept}
        self._ratios.clear()
        self._pace = 1.0


def _is_near(bucket: int, other: int) -> bool:
    return 1 / NEAR <= bucket / other <= NEAR


def bucket_of(batch_size: int) -> int:
    """The largest of `BUCKETS` that is not above it."""
    return BUCKETS[bisect_right(BUCKETS, batch_size) - 1]
