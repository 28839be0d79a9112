# SPDX-License-Identifier: Apache-2.0
"""The draft length that gives the most tokens a second here, zero included, by what steps have cost and brought."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from dflash_trt.runtime.position_acceptance import Acceptance
from dflash_trt.runtime.shared_drafts import share_out, tokens_by_length

WINDOW = 15
"""Steps whose lower median is a price: seven outliers among them move nothing, and eight steps show a change."""
MIN_SAMPLES = 2
"""Steps that make a price; also what a first look, or a look at another length, takes."""
MIN_GAIN = 0.03
"""What a switch must promise beyond the present length: hysteresis against noise."""
HOPEFUL_LOOK, FIRST_LOOK, LAST_LOOK = 8, 64, 512
"""Steps between looks at other lengths: while one that was never tried may be best; then, doubling each time."""
DRIFT = 1.5
"""A full window whose price moves by this factor says that the machine has changed: other prices are forgotten."""
LOOK_COST = 0.02
"""Share of the time that a look may take of that since the one before it."""
HOPE = 0.3
"""The same share, where a length that was never tried may be better: of what it would gain at best."""
RECONSIDER_EVERY = 4
"""Steps; looks begin on the same, because both reckon with all lengths."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of running requests that have prices of their own, each up to the next."""

log = logging.getLogger("dflash_trt.runtime")


class AutoLength:
    """Takes the mean length k with the most expected tokens / price(requests, k), and shares it out to the requests.

    What a request's drafts are worth is what its own passes say, and all requests' passes where it has few. Prices
    are medians of measured steps. It begins with the whole block and no drafts, for two steps each, and from then
    on verifies what promises most. A length that was never tried is taken to cost what lies on the line between
    its neighbours; it is looked at where it would be best at the price of the shorter one.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._acceptance = Acceptance(num_draft_tokens)
        """Of all requests together."""
        self._own: dict[int, Acceptance] = {}
        """By slot."""
        self._slots: list[int] = []
        self._reached: list[list[float]] = [[1.0] * num_draft_tokens]
        """P(1) .. P(K) of each of `_slots`, as they were last looked up."""
        self._shared: dict[int, list[int]] = {}
        """Lengths of each of `_slots`, by their mean."""
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._length = num_draft_tokens
        self._bucket = 1
        self._trial = num_draft_tokens
        self._trial_steps = 0
        self._since_look = 0
        self._pause = HOPEFUL_LOOK
        self._num_looks = 0

    def choose(self, slots: Sequence[int]) -> list[int]:
        """The present best, or a length that is looked at; more of it for requests whose drafts hold."""
        self._bucket = _bucket(len(slots))
        if list(slots) != self._slots:
            self._slots = list(slots)
            self._look_up()
        length = self._mean_length()
        if length not in self._shared:
            self._shared[length] = share_out(self._reached, length)
        return list(self._shared[length])

    def _look_up(self) -> None:
        pooled = self._acceptance.shares()
        own = [self._own.get(slot) for slot in self._slots]
        self._reached = [self._acceptance.reached() if each is None else each.reached(pooled) for each in own]
        self._shared.clear()

    def _mean_length(self) -> int:
        K = self._acceptance.num_positions
        for length in (K, 0):
            if not self._price(length):
                return length
        if self._trial_steps == 0:
            self._since_look += 1
            if self._since_look % RECONSIDER_EVERY == 0:
                self._look_up()
                self._reconsider()
                if self._since_look >= self._pause:
                    self._look()
        if self._trial_steps == 0:
            return self._length
        self._trial_steps -= 1
        return self._trial

    def observe(self, slot: int, proposed: int, accepted: int) -> None:
        """Counts which positions were reached and which of them held."""
        self._acceptance.observe(proposed, accepted)
        own = self._own.setdefault(slot, Acceptance(self._acceptance.num_positions))
        own.observe(proposed, accepted)
        own.fade(proposed)

    def release(self, slot: int) -> None:
        """Forgets what its request's drafts were worth."""
        self._own.pop(slot, None)

    def measure(self, batch_size: int, length: int, seconds: float) -> None:
        """Notes what a step over `batch_size` requests took that verified `length` drafts of each, on average."""
        bucket = _bucket(batch_size)
        before = self._median(bucket, length)
        window = self._seconds.setdefault((bucket, length), deque(maxlen=WINDOW))
        is_full = len(window) == WINDOW
        window.append(seconds)
        if is_full and not 1 / DRIFT < self._median(bucket, length) / before < DRIFT:
            self._seconds = {(bucket, length): window}

    def explain(self) -> str:
        """What is chosen, and why: "7 of 7: 412 tokens/s at 1 request, 230 without drafts"."""
        K = self._acceptance.num_positions
        if not (self._price(0) and self._price(K)):
            return f"{self._length} of {K}: not measured yet"
        speeds = self._speeds()
        number = len(self._reached)
        requests = f"{number} request" + "s" * (number > 1)
        return (
            f"{self._length} of {K}: {speeds[self._length]:.0f} tokens/s at {requests}, {speeds[0]:.0f} without drafts,"
            f" {speeds[K]:.0f} with the whole block"
        )

    def _reconsider(self) -> None:
        speeds = self._speeds()
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > (1 + MIN_GAIN) * speeds[self._length]:
            self._try(best)
            self._length, self._pause = best, HOPEFUL_LOOK
            log.info("draft length %s", self.explain())

    def _look(self) -> None:
        """Tries another length: one without a price that may be best, else none, all and the neighbours in turn.

        Not before steps without a look have earned it: its time is `LOOK_COST` of theirs, or more where it may gain.
        """
        K = self._acceptance.num_positions
        turns = (0, K, self._length + 1, self._length - 1)
        others = [length for length in turns if 0 <= length <= K and length != self._length]
        hopeful, gain = self._hopeful()
        trial = others[self._num_looks % len(others)] if hopeful is None else hopeful
        prices = self._prices()
        steps = self._num_trial_steps * prices[trial] / prices[self._length]
        if self._since_look < steps / max(HOPE * gain, LOOK_COST):
            return
        self._try(trial)
        if hopeful is None:
            self._num_looks += 1
            self._pause = min(2 * max(self._pause, FIRST_LOOK // 2), LAST_LOOK)
        else:
            self._pause = HOPEFUL_LOOK

    def _hopeful(self) -> tuple[int | None, float]:
        """The length without a price that would be best, and better than the present one, if it cost no more than the
        next shorter one that has a price; and the share by which it would be better."""
        tokens, now = tokens_by_length(self._reached), self._speeds()[self._length]
        best, price, hopeful = (1 + MIN_GAIN) * now, self._price(0), None
        for length in range(1, len(tokens)):
            if own := self._price(length):
                price = own
            elif (speed := tokens[length] / price) > best:
                best, hopeful = speed, length
        return hopeful, best / now - 1 if hopeful else 0.0

    def _try(self, length: int) -> None:
        self._trial, self._trial_steps = length, self._num_trial_steps
        self._since_look = 0

    @property
    def _num_trial_steps(self) -> int:
        """The first one is not measured where contexts must catch up."""
        return MIN_SAMPLES + (self._length == 0)

    def _speeds(self) -> list[float]:
        """Expected tokens a second of all requests, by length 0 .. K, both of which have a price."""
        return [count / price for count, price in zip(tokens_by_length(self._reached), self._prices(), strict=True)]

    def _prices(self) -> list[float]:
        """Seconds of a step by length 0 .. K: measured, else on the line between its neighbours'."""
        K = self._acceptance.num_positions
        known = {length: price for length in range(K + 1) if (price := self._price(length))}
        prices: list[float] = np.interp(range(K + 1), list(known), list(known.values())).tolist()
        return prices

    def _price(self, length: int) -> float:
        """Seconds of a step: measured, else by the ratio to another length that a bucket nearby has; 0 for none.

        `explain` asks from other threads, while prices come in.
        """
        if own := self._median(self._bucket, length):
            return own
        measured = [k for b, k in list(self._seconds) if b == self._bucket and self._median(b, k)]
        near = [b for b in BUCKETS if 0.5 <= b / self._bucket <= 2 and self._median(b, length)]
        pairs = [(b, k) for b in near for k in measured if self._median(b, k)]
        if not pairs:
            return 0.0
        b, k = min(pairs, key=lambda pair: (abs(pair[0] - self._bucket), abs(pair[1] - length)))
        return self._median(self._bucket, k) * self._median(b, length) / self._median(b, k)

    def _median(self, bucket: int, length: int) -> float:
        """0 for what has no price."""
        seconds = self._seconds.get((bucket, length), ())
        return statistics.median_low(seconds) if len(seconds) >= MIN_SAMPLES else 0.0


def _bucket(batch_size: int) -> int:
    return max(bucket for bucket in BUCKETS if bucket <= batch_size)
