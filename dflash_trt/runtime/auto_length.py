# SPDX-License-Identifier: Apache-2.0
"""The draft length that gives the most tokens a second here, zero included, by what steps have cost and brought."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import numpy as np

from dflash_trt import _C
from dflash_trt.runtime.shared_drafts import share_out, tokens_by_length
from dflash_trt.runtime.step_prices import BESIDE, LOOK, Array, Place, Step, StepPrices, bucket_of

MIN_GAIN = 0.01
"""What a switch must promise beyond the present length, and beyond one standard deviation of what is not known."""
OPTIMISM = 2.0
"""Standard deviations that a length may be better than it looks: then it is looked at."""
COLD, MAX_COLD = 2.0, 8
"""The first step of another length warms caches up; of shorter steps, those do within so many times what they are
shorter by, up to so many steps: what longer ones have driven out of the caches comes back little by little."""
MAX_LOOK = 16
"""Steps of a look at shorter steps, and of the present length behind any, until enough warm ones have been measured."""
CATCH_UP = 0.02
"""What a step without drafts leaves to do for the next one with drafts, as a share of it: context for the drafter."""
LOOK_COST = 0.01
"""Share of the time since the last look that a look may lose."""
LEAST_LOSS = 0.2
"""What a look's time is taken to lose at least, as a share of it."""
HOPE = 0.3
"""Of the share that a look may gain, how much it may lose."""
FIRST_REVIEW, DOUBLINGS = 16, 4
"""Steps after which no drafts, or whole blocks, are looked at again, whatever is known of them: at first, then twice as
many, so many times. What the first steps showed may have been a slow moment."""
FIRST_REVIEW_COST = 0.02
"""Share of the time before it that the first review may lose, beside what drafts must catch up with."""
FIRST_STEPS, FIRST_PASSES = 8, 24
"""Of whole blocks where nothing is known, and over how many requests in all: they say what drafts are worth."""
MIN_LEFT = 8
"""Tokens of the longest request that are left where another length is still worth a thought."""
SOON, LATER, SETTLED = 8, 64, 64
"""Steps between thoughts: up to so many steps behind a switch, and from then on."""
WITHOUT_DRAFTS = 256
"""The same where none are made, and so nothing is learnt of them."""
SHARE_STEPS = 16
"""Steps after which the drafts are shared out anew: requests come and go."""
NOTICE_STEPS = 8
"""Steps after which it asks what is left; sooner where requests have come or gone."""
RETHINK = 1.5
"""Sooner where the number of requests has changed by this factor."""

NO_SLOT = 1 << 20
"""From here on slots are nobody's."""

log = logging.getLogger("dflash_trt.runtime")


class Remaining(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens requests will still get that are awaited together, and that nobody follows."""

    running: dict[int, int]
    """By slot, those included that still read their prompts."""
    waiting: list[int]
    """In the order in which they will run."""


def unknown() -> None:
    """Nobody knows what is left."""


class AutoLength:
    """Takes the mean length k with the most expected tokens / price(requests, k), and shares it out to the requests.

    What a request's drafts are worth is what its own passes say, and all requests' passes where it has few. Prices are
    what a surface through measured steps says. It begins with the whole block for eight steps, which say what drafts
    are worth, and no drafts for three; from then on it verifies what promises most, and looks at what may be better.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._prices = StepPrices(num_draft_tokens)
        self._acceptance = _C.AcceptanceCounts(num_draft_tokens)
        self._steps: list[tuple[int, int, tuple[float, float, bool]]] = []
        """That have been measured since the last thought."""
        self._length = num_draft_tokens
        """The present best."""
        self._next = num_draft_tokens
        """What the next `_left` steps verify, on average: it, or what is looked at."""
        self._chosen: dict[int, int] = {}
        """Of each slot; who came since gets `_next`."""
        self._age = 0
        """Steps of `_next` so far, the present one counted."""
        self._left = 0
        self._enough = 0
        """More warm steps that end a look, or what is measured behind it; 0 where there is none."""
        self._last_seconds = self._seconds_before = 0.0
        """Of the last step, and of the last one before `_next`."""
        self._number = 0
        """Of requests at the last thought."""
        self._num_slots = 0
        """Of requests that decode."""
        self._are_last = False
        """Whether nobody followed them."""
        self._since_look = 0
        self._since_switch = 0
        self._since_drafting = 0
        self._since_review = 0
        self._num_reviews = 0
        self._told: tuple[int, list[float]] = (0, [])
        """Requests, and tokens a second by length, as they were last reckoned; `explain` asks from other threads."""

    def choose(self, slots: Sequence[int], remaining: Callable[[], Remaining | None] = unknown) -> list[int]:
        """The present best, or a length that is looked at; more of it for requests whose drafts hold.

        With what is `remaining`, what brings all requests to their end first, and the same of all of them.
        """
        asks = self._left <= 0 or self._left % NOTICE_STEPS == 0 or len(slots) != self._num_slots
        if asks and self._must_think(slots, left := remaining()):
            self._think(list(slots), left)
        elif self._left % SHARE_STEPS == 0 and not self._are_last:
            self._share(list(slots))
        self._left -= 1
        self._age += 1
        self._since_look += self._next == self._length
        self._since_drafting = self._since_drafting + 1 if self._next == 0 else 0
        self._since_switch += 1
        self._since_review += 1
        return [self._chosen.get(slot, self._next) for slot in slots] if self._chosen else [self._next] * len(slots)

    def _must_think(self, slots: Sequence[int], remaining: Remaining | None) -> bool:
        """Whether what was chosen has run for as long as it should, or for others."""
        number, are_last = len(slots if remaining is None else remaining.running), remaining is not None
        self._num_slots = len(slots)
        if self._left > 0 and are_last == self._are_last and 1 / RETHINK < number / self._number < RETHINK:
            return False
        self._number, self._are_last = number, are_last
        return True

    def _think(self, slots: list[int], remaining: Remaining | None) -> None:
        """Counts what steps have shown, and chooses for the next ones; between two thoughts nothing is reckoned."""
        if self._next != self._length and self._left <= 0:
            self._return_from_look(slots)
            return
        K, before = self._num_draft_tokens, self._next
        bucket = bucket_of(self._number)
        self._prices.measure([Step(Place.of(size, length), *rest) for size, length, rest in self._steps])
        self._steps.clear()
        self._enough = 0
        if remaining is None:
            reached = self._acceptance.reached(slots)
        else:
            nobodys = range(NO_SLOT, NO_SLOT + len(remaining.waiting))
            reached = self._acceptance.reached([*remaining.running, *nobodys], like_earlier_ones=True)
        if remaining is not None and max(chain(remaining.running.values(), remaining.waiting)) <= MIN_LEFT:
            self._next, self._left = self._length, MIN_LEFT
        elif not self._prices.knows(bucket, K):
            self._next, self._left = K, max(FIRST_STEPS, FIRST_PASSES // self._number)
        elif not self._prices.knows(bucket, 0):
            self._look_at(0)
            self._since_review = self._num_reviews = 0
        else:
            self._reconsider(bucket, reached, remaining)
        if self._next != before:
            self._begin()
        self._share(slots)

    def _look_at(self, length: int) -> None:
        """Until enough warm steps of it have been measured; of longer ones only the first is cold."""
        self._next, self._left, self._enough = length, MAX_LOOK if length < self._length else 1 + LOOK, LOOK

    def _return_from_look(self, slots: list[int]) -> None:
        self._next, self._left, self._enough = self._length, MAX_LOOK, BESIDE
        self._begin()
        self._share(slots)

    def _begin(self) -> None:
        """Another length than before."""
        self._age, self._seconds_before = 0, self._last_seconds

    def _share(self, slots: list[int]) -> None:
        """The same of all where all end together, and where there is nothing to choose."""
        self._chosen = {}
        if not self._are_last and len(slots) > 1 and 0 < self._next < self._num_draft_tokens:
            lengths = share_out(self._acceptance.reached(slots), self._next)
            self._chosen = dict(zip(slots, lengths, strict=True))

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes which positions were reached and which of them held."""
        self._acceptance.observe(slots, proposed, accepted)

    def release(self, slot: int) -> None:
        """Forgets what its request's drafts were worth."""
        self._acceptance.release(slot)
        self._chosen.pop(slot, None)

    def measure(self, batch_size: int, length: int, seconds: float, draft_seconds: float) -> None:
        """Notes what a step took, unless it is one of the first of its length: other data come into the caches."""
        self._last_seconds = seconds
        cold_seconds = COLD * (self._seconds_before - seconds)
        if self._age == 1 or (self._age <= MAX_COLD and (self._age - 1) * seconds < cold_seconds):
            return
        self._steps.append((batch_size, length, (seconds, draft_seconds, length != self._length)))
        if self._enough:
            self._enough -= 1
            self._left *= self._enough > 0

    def explain(self) -> str:
        """What is chosen, and why: "7 of 7: 412 tokens/s at 1 request, 230 without drafts"."""
        K, (number, speeds) = self._num_draft_tokens, self._told
        if not speeds:
            return f"{self._length} of {K}: not measured yet"
        requests = f"{number} request" + "s" * (number > 1)
        return (
            f"{self._length} of {K}: {speeds[self._length]:.0f} tokens/s at {requests}, {speeds[0]:.0f} without drafts,"
            f" {speeds[K]:.0f} with the whole block"
        )

    def _reconsider(self, bucket: int, reached: Array, remaining: Remaining | None) -> None:
        """Switches to what is surely better; looks at what may be, when steps without a look have earned it."""
        if remaining is None:
            (seconds,), covariance = self._prices.estimate(bucket)
            steps = np.full(len(seconds), math.inf)
            speeds = np.array(tokens_by_length(reached)) / seconds
        else:
            number, tokens = self._number, [*remaining.running.values(), *remaining.waiting]
            sizes = sorted({1, (number + 1) // 2, number})
            prices, covariance = self._prices.estimate(bucket, [size / number for size in sizes])
            seconds, to_end = prices[-1], np.array(_C.seconds_to_end(tokens, reached, sizes, prices))
            to_end[1:] += CATCH_UP * self._since_drafting * seconds[0]
            steps, speeds = to_end / seconds, sum(tokens) / to_end
        shares = covariance / np.outer(seconds, seconds)  # covariance of the logarithms
        self._told = self._number, speeds.tolist()
        gains, doubts = np.log(speeds / speeds[self._length]), self._doubts(shares)
        best = int(np.argmax(gains - doubts))
        if gains[best] - doubts[best] > MIN_GAIN:
            self._length, self._since_switch = best, 0
            log.info("draft length %s", self.explain())
            gains = np.log(speeds / speeds[best])
        self._next, self._left = self._length, LATER if self._length else WITHOUT_DRAFTS
        if self._since_switch < SETTLED:
            self._left = SOON

        hopes = gains + OPTIMISM * self._lessons(shares)
        look, ends = int(np.argmax(hopes)), [end for end in (0, self._num_draft_tokens) if end != self._length]
        ratios = seconds / seconds[self._length]
        times = LOOK * ratios + np.maximum(ratios, COLD * (1 - ratios))
        losses = times * np.maximum(1 - np.exp(gains), LEAST_LOSS)
        rival = max(ends, key=speeds.__getitem__)
        if self._must_review(losses[rival], steps[self._length]):
            self._look_at(rival)
            self._since_review, self._num_reviews = 0, self._num_reviews + 1
        elif look != self._length and hopes[look] > MIN_GAIN and self._since_look >= SOON:
            loss, hope = losses[look] + CATCH_UP * self._since_drafting, HOPE * (math.exp(hopes[look]) - 1)
            if self._since_look >= loss / max(LOOK_COST, hope) and hope * steps[self._length] >= loss:
                self._look_at(look)
                self._since_look = 0

    def _must_review(self, loss: float, num_left: float) -> bool:
        """Whether it is time to look again at what does not run, for a loss of so many steps."""
        is_first = self._num_reviews == 0
        share = FIRST_REVIEW_COST if is_first else LOOK_COST
        loss += 0 if is_first else CATCH_UP * self._since_drafting
        is_due = self._since_review >= FIRST_REVIEW << min(self._num_reviews, DOUBLINGS)
        return is_due and loss <= share * min(self._since_review, num_left)

    def _doubts(self, shares: Array) -> Array:
        """Standard deviations of each length's gain over the present one."""
        own = np.diag(shares)
        variances: Array = own + own[self._length] - 2 * shares[self._length]
        return np.sqrt(np.maximum(variances, 0))

    def _lessons(self, shares: Array) -> Array:
        """Standard deviations of what a look at each length would teach of its gain."""
        own = np.diag(shares)
        lessons: Array = np.abs(own - shares[self._length]) / np.sqrt(own + self._prices.noise**2)
        return lessons
