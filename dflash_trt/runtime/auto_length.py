# SPDX-License-Identifier: Apache-2.0
"""The draft length that gives the most tokens a second here, zero included, by what steps have cost and brought."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from dflash_trt.runtime.position_acceptance import Acceptance
from dflash_trt.runtime.shared_drafts import share_out, tokens_by_length
from dflash_trt.runtime.step_prices import MIN_SAMPLES, StepPrices, bucket_of

MIN_GAIN = 0.03
"""What a switch must promise beyond the present length: hysteresis against noise."""
FEW_SAMPLES, MIN_GAIN_OF_FEW = 6, 0.08
"""The same where its price is of fewer steps than that: the luckiest of many lengths looks better than it is."""
HOPEFUL_LOOK, FIRST_LOOK, LAST_LOOK = 8, 64, 512
"""Steps between looks at other lengths: while one that was never tried may be best; then, doubling each time."""
LOOK_COST = 0.02
"""Share of the time that a look may take of that since the one before it."""
HOPE = 0.3
"""The same share, where a length that was never tried may be better: of what it would gain at best."""
SOON, LATER = 8, 32
"""Steps between thoughts: up to `FIRST_LOOK` steps behind a look, and from then on."""

log = logging.getLogger("dflash_trt.runtime")


class AutoLength:
    """Takes the mean length k with the most expected tokens / price(requests, k), and shares it out to the requests.

    What a request's drafts are worth is what its own passes say, and all requests' passes where it has few. Prices
    are medians of measured steps. It begins with the whole block for eight steps, which say what drafts are worth, and
    no drafts for two, and from then on verifies what promises most. A length that was never tried is taken to cost
    what lies on the line between its neighbours; it is looked at where it would be best at the price of the shorter
    one.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._prices = StepPrices(num_draft_tokens)
        self._acceptance = Acceptance(num_draft_tokens)
        self._slots: list[int] = []
        self._reached = np.ones((1, num_draft_tokens))
        """P(1) .. P(K) of each of `_slots`, as they were last looked up."""
        self._steps: list[tuple[int, int, float, float, bool]] = []
        """That have been measured since."""
        self._length = num_draft_tokens
        """The present best."""
        self._chosen: list[int] = []
        """What the next `_left` steps verify of each of `_slots`."""
        self._left = 0
        self._bucket = 1
        self._is_look = False
        self._since_look = 0
        self._pause = HOPEFUL_LOOK
        self._num_looks = 0

    def choose(self, slots: Sequence[int]) -> list[int]:
        """The present best, or a length that is looked at; more of it for requests whose drafts hold."""
        if list(slots) != self._slots or self._left == 0:
            self._slots = list(slots)
            self._think()
        self._left -= 1
        self._since_look += not self._is_look
        return list(self._chosen)

    def _think(self) -> None:
        """Counts what steps have shown, and chooses for the next ones; between two thoughts nothing is reckoned."""
        K, self._bucket = self._num_draft_tokens, bucket_of(len(self._slots))
        for step in self._steps:
            self._prices.measure(*step)
        self._steps.clear()
        self._reached = self._acceptance.reached(self._slots)
        if not self._prices.has_ends(self._bucket):
            length, self._left = (0, MIN_SAMPLES) if self._prices.known(self._bucket, K) else (K, SOON)
        else:
            self._reconsider()
            length, self._left = self._length, SOON if self._since_look < FIRST_LOOK else LATER
            trial = self._trial() if self._since_look >= self._pause else None
            self._is_look = trial is not None
            if trial is not None:
                length, self._left, self._since_look = trial, self._num_trial_steps, 0
        self._chosen = share_out(self._reached, length)

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes which positions were reached and which of them held."""
        self._acceptance.observe(slots, proposed, accepted)

    def release(self, slot: int) -> None:
        """Forgets what its request's drafts were worth."""
        self._acceptance.release(slot)

    def measure(self, batch_size: int, length: int, seconds: float, draft_seconds: float) -> None:
        """Notes what a step took."""
        self._steps.append((batch_size, length, seconds, draft_seconds, length != self._length))

    def explain(self) -> str:
        """What is chosen, and why: "7 of 7: 412 tokens/s at 1 request, 230 without drafts"."""
        K, speeds = self._num_draft_tokens, self._speeds()
        if not speeds:
            return f"{self._length} of {K}: not measured yet"
        number = len(self._reached)
        requests = f"{number} request" + "s" * (number > 1)
        return (
            f"{self._length} of {K}: {speeds[self._length]:.0f} tokens/s at {requests}, {speeds[0]:.0f} without drafts,"
            f" {speeds[K]:.0f} with the whole block"
        )

    def _reconsider(self) -> None:
        speeds = self._speeds()
        best = max(range(len(speeds)), key=speeds.__getitem__)
        is_sure = self._prices.num_samples(self._bucket, best) >= FEW_SAMPLES
        if speeds[best] > (1 + (MIN_GAIN if is_sure else MIN_GAIN_OF_FEW)) * speeds[self._length]:
            self._length, self._pause, self._since_look = best, HOPEFUL_LOOK, 0
            log.info("draft length %s", self.explain())

    def _trial(self) -> int | None:
        """Another length to look at: one without a price that may be best, else none, all and the neighbours in turn.

        Not before steps without a look have earned it: its time is `LOOK_COST` of theirs, or more where it may gain.
        """
        K = self._num_draft_tokens
        turns = (0, K, self._length + 1, self._length - 1)
        others = [length for length in turns if 0 <= length <= K and length != self._length]
        hopeful, gain = self._hopeful()
        trial = others[self._num_looks % len(others)] if hopeful is None else hopeful
        prices = self._prices.by_length(self._bucket)
        steps = self._num_trial_steps * prices[trial] / prices[self._length]
        if self._since_look < steps / max(HOPE * gain, LOOK_COST):
            return None
        if hopeful is None:
            self._num_looks += 1
            self._pause = min(2 * max(self._pause, FIRST_LOOK // 2), LAST_LOOK)
        else:
            self._pause = HOPEFUL_LOOK
        return trial

    def _hopeful(self) -> tuple[int | None, float]:
        """The length of few steps that would be best, and better than the present one; and by which share.

        One without a price may cost no more than the next shorter one that has one.
        """
        tokens, speeds = tokens_by_length(self._reached), self._speeds()
        now = speeds[self._length] * self._prices.pace
        best, price, hopeful = (1 + MIN_GAIN) * now, self._prices.floor(self._bucket), None
        for length in range(1, len(tokens)):
            if own := self._prices.known(self._bucket, length):
                price = own
            is_sure = self._prices.num_samples(self._bucket, length) >= FEW_SAMPLES
            if length != self._length and not is_sure and (speed := tokens[length] / price) > best:
                best, hopeful = speed, length
        return hopeful, best / now - 1 if hopeful else 0.0

    @property
    def _num_trial_steps(self) -> int:
        """The first one is not measured where contexts must catch up."""
        return MIN_SAMPLES + (self._length == 0)

    def _speeds(self) -> list[float]:
        """Expected tokens a second of all requests, by length 0 .. K; none while there are no prices.

        `explain` asks from other threads, while prices come and go.
        """
        prices, pace = self._prices.by_length(self._bucket), self._prices.pace
        if not prices or not all(prices):
            return []
        return [count / (price * pace) for count, price in zip(tokens_by_length(self._reached), prices, strict=True)]
