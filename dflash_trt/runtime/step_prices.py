# SPDX-License-Identifier: Apache-2.0
"""What steps have cost here: medians of measured times, by running requests and drafts verified of each."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from functools import cache

import numpy as np

WINDOW = 15
"""Steps whose lower median is a price: seven outliers among them move nothing."""
MIN_SAMPLES = 2
"""Steps that make a price, and so what a look at another length takes."""
PACE_STEPS = 15
"""Steps whose median says how fast the machine is now."""
DRIFT = 1.5
"""A pace that moves by this factor says that costs have changed: prices of what did not run since are forgotten."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of running requests that have prices of their own, each up to the next."""
NEAR = 2.0
"""Buckets within this factor lend each other prices."""
_DRAFTING = -1
"""In the place of a length: the drafter's part of a step, which is the same for all of them."""


class StepPrices:
    """Seconds of a step by bucket and length 0 .. K; readable from other threads while prices come in.

    A machine has faster and slower minutes, and contexts grow. So that what runs now does not look dear beside what ran
    in a better minute, all prices are of one pace: the price of what runs now stays as its first `WINDOW` steps made
    it, what it takes beside that is the pace, and a look's seconds are divided by it.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._prices: dict[tuple[int, int], float] = {}
        """Of those with enough samples."""
        self._ratios: deque[float] = deque(maxlen=PACE_STEPS)
        self.pace = 1.0
        """What steps take now beside their prices."""

    def measure(
        self, batch_size: int, length: int, seconds: float, draft_seconds: float, is_look: bool = False
    ) -> None:
        """Notes what a step over `batch_size` requests took that verified `length` drafts of each, on average.

        `is_look` where other steps run another length.
        """
        what = bucket_of(batch_size), length
        if not is_look and len(self._seconds.get(what, ())) == WINDOW:
            self._ratios.append(seconds / self._prices[what])
            self.pace = statistics.median(self._ratios)
            if len(self._ratios) == PACE_STEPS and not 1 / DRIFT < self.pace < DRIFT:
                self._forget(what)
        else:
            self._add(what, seconds)
        if length > 0:
            self._add((bucket_of(batch_size), _DRAFTING), draft_seconds)

    def known(self, bucket: int, length: int) -> float:
        """The price, 0 for none: the bucket's own, or where it has no prices at all, the nearest one's.

        No drafts, the whole block and drafting itself are lent by buckets nearby, too, by the ratio to a length that
        both have.
        """
        prices, near = self._prices, _near(bucket)
        if own := prices.get((bucket, length)):
            return own
        priced = {b for b, k in list(prices) if k >= 0}
        base = next((b for b in near if b in priced), None)
        if base is None or (base, length) in prices or 0 < length < self._num_draft_tokens:
            return 0.0 if base is None else prices.get((base, length), 0.0)
        lengths = sorted(range(self._num_draft_tokens + 1), key=lambda k: abs(k - length))
        for b in near:
            for k in lengths:
                if (b, length) in prices and (b, k) in prices and (base, k) in prices:
                    return prices[base, k] * prices[b, length] / prices[b, k]
        return 0.0

    def num_samples(self, bucket: int, length: int) -> int:
        """Steps that the bucket's own price is made of."""
        return len(self._seconds.get((bucket, length), ()))

    def has_ends(self, bucket: int) -> bool:
        """Whether no drafts and the whole block have prices."""
        return bool(self.known(bucket, 0) and self.known(bucket, self._num_draft_tokens))

    def by_length(self, bucket: int) -> list[float]:
        """Prices of 0 .. K; none while an end has no price.

        One that is not known lies on the line between its neighbours; the shorter one of length 1 is a step that drafts
        and verifies nothing of it.
        """
        if not self.has_ends(bucket):
            return []
        floor = self.floor(bucket)
        known = {k: price for k in range(1, self._num_draft_tokens + 1) if (price := self.known(bucket, k))}
        lengths = range(1, self._num_draft_tokens + 1)
        line: list[float] = np.interp(lengths, [0, *known], [floor, *known.values()]).tolist()
        return [self.known(bucket, 0), *line]

    def floor(self, bucket: int) -> float:
        """What a step takes at least that drafts."""
        return self.known(bucket, 0) + self.known(bucket, _DRAFTING)

    def _add(self, what: tuple[int, int], seconds: float) -> None:
        window = self._seconds.setdefault(what, deque(maxlen=WINDOW))
        window.append(seconds / self.pace)
        if len(window) >= MIN_SAMPLES:
            self._prices[what] = statistics.median_low(window)

    def _forget(self, what: tuple[int, int]) -> None:
        """All but what runs now, at its present price."""
        price = self._prices[what] * self.pace
        self._seconds, self._prices = {what: deque([price] * MIN_SAMPLES, maxlen=WINDOW)}, {what: price}
        self._ratios.clear()
        self.pace = 1.0


@cache
def _near(bucket: int) -> list[int]:
    """Buckets that lend it prices, the nearest first, and first of all itself."""
    return sorted((b for b in BUCKETS if 1 / NEAR <= b / bucket <= NEAR), key=lambda b: abs(b - bucket))


def bucket_of(batch_size: int) -> int:
    """The largest of `BUCKETS` that is not above it."""
    return BUCKETS[bisect_right(BUCKETS, batch_size) - 1]
