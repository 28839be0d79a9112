# SPDX-License-Identifier: Apache-2.0
"""How many drafted tokens a step verifies: what is fastest here, a number, a schedule by batch size, or by acceptance.

The drafter always fills its whole block, as it was trained to; this decides how much of it the target sees. Longer
is not better: each verified token costs, above all on mixture-of-experts targets at high batch, where more tokens
read more experts. Output does not depend on it (docs/sampling.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dflash_trt import _C
from dflash_trt.errors import RequestError
from dflash_trt.runtime.auto_length import AutoLength, Remaining, unknown
from dflash_trt.runtime.sampling import is_integer

DEFAULT_TOKEN_COST = 0.05
"""Of one more verified token, as a share of a pass that verifies none."""
MIN_GAIN = 0.05
"""The change a switch must promise: hysteresis against noise."""
MIN_PASSES = 16
"""Passes between switches."""
PROBE_EVERY = 64
"""Each so many passes the whole block is verified once, to see what longer drafts would bring."""


class DraftLength(Protocol):
    """Chooses, before each step, how many of the K drafted tokens of each request are verified."""

    def choose(self, slots: Sequence[int], remaining: Callable[[], Remaining | None] = unknown) -> list[int]:
        """0 .. K for each of the requests in these slots; 0 is plain decoding.

        `remaining` says what is left to do, where that is known, nobody else follows, and what counts is when the last
        request ends.
        """

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns from a step: how many drafts the request of each slot verified, and how many of these it accepted."""

    def measure(self, batch_size: int, length: int, seconds: float, draft_seconds: float) -> None:
        """Learns what a step took over `batch_size` requests that verified `length` drafts of each, on average.

        `draft_seconds` of it until the drafts were there.
        """

    def release(self, slot: int) -> None:
        """The request in this slot has ended."""

    def explain(self) -> str:
        """What is chosen, and why."""


class _UniformLength:
    """One length for all requests, which no measured time changes."""

    def choose(self, slots: Sequence[int], remaining: Callable[[], Remaining | None] = unknown) -> list[int]:
        """The same for all."""
        return [self.length_of(len(slots))] * len(slots)

    def length_of(self, batch_size: int) -> int:
        """The length of a step over so many requests."""
        raise NotImplementedError

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing to learn."""

    def measure(self, batch_size: int, length: int, seconds: float, draft_seconds: float) -> None:
        """Nothing to learn."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""


class FixedLength(_UniformLength):
    """Always the same."""

    def __init__(self, length: int) -> None:
        self.length = length

    def length_of(self, batch_size: int) -> int:
        """The length, whatever the batch."""
        return self.length

    def explain(self) -> str:
        """The length."""
        return f"{self.length}: fixed"


class LengthByBatch(_UniformLength):
    """The length of the largest scheduled batch size that the step reaches."""

    def __init__(self, schedule: Mapping[int, int]) -> None:
        """`schedule` maps a smallest batch size to a length, and has one for batch size 1."""
        self._schedule = dict(sorted(schedule.items(), reverse=True))

    def length_of(self, batch_size: int) -> int:
        """The scheduled length."""
        return next(length for begin, length in self._schedule.items() if batch_size >= begin)

    def explain(self) -> str:
        """The schedule."""
        return ", ".join(f"{length} from batch size {begin}" for begin, length in reversed(self._schedule.items()))


class AdaptiveLength(_UniformLength):
    """The length with the most expected tokens for its cost, by measured acceptance.

    A pass that verifies k drafts emits 1 + P(1) + .. + P(k) tokens, P(i) being the share of passes that accept
    position i and all before it, and costs 1 + k * batch_size * token_cost. It verifies one at least, to go on
    learning.
    """

    def __init__(self, num_draft_tokens: int, token_cost: float = DEFAULT_TOKEN_COST) -> None:
        self._token_cost = token_cost
        self._length = num_draft_tokens
        self._acceptance = _C.AcceptanceCounts(num_draft_tokens)
        self._passes = 0
        self._last_switch = 0

    def length_of(self, batch_size: int) -> int:
        """The present choice; now and then the whole block, as a probe."""
        self._passes += 1
        if self._passes % PROBE_EVERY == 0:
            return self._acceptance.num_positions
        if self._passes - self._last_switch >= MIN_PASSES:
            self._reconsider(batch_size)
        return self._length

    def observe(self, slots: Sequence[int], proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts which positions were reached and which of them held."""
        self._acceptance.observe(slots, proposed, accepted)

    def explain(self) -> str:
        """The present choice."""
        return f"{self._length}: by acceptance, at a token cost of {self._token_cost:g}"

    def _reconsider(self, batch_size: int) -> None:
        gains = self._tokens_per_cost(batch_size)
        best = max(range(1, len(gains)), key=gains.__getitem__)
        if gains[best] > (1 + MIN_GAIN) * gains[self._length]:
            self._length = best
            self._last_switch = self._passes

    def _tokens_per_cost(self, batch_size: int) -> list[float]:
        """By length 0 .. K."""
        tokens = self._acceptance.expected_tokens()
        return [count / (1 + length * batch_size * self._token_cost) for length, count in enumerate(tokens)]


def parse_draft_length(given: int | str, num_draft_tokens: int) -> DraftLength:
    """Reads auto, 7 (a number), 1:7,8:3,32:0 (from batch size 1, 8, 32 on), adaptive or adaptive:0.1 (its token cost).

    Raises RequestError for anything else, and for lengths above `num_draft_tokens`.
    """
    text = str(given) if is_integer(given) else given
    if not isinstance(text, str):
        raise _no_length(given, num_draft_tokens)
    if text == "auto":
        return AutoLength(num_draft_tokens)
    kind, _, cost = text.partition(":")
    try:
        if kind == "adaptive":
            token_cost = float(cost) if cost else DEFAULT_TOKEN_COST
            if not 0 <= token_cost < float("inf"):
                raise ValueError(text)
            return AdaptiveLength(num_draft_tokens, token_cost)
        if ":" not in text:
            return FixedLength(_length(text, num_draft_tokens))
        pairs = [part.split(":") for part in text.split(",")]
        schedule = {int(begin): _length(length, num_draft_tokens) for begin, length in pairs}
        if min(schedule) != 1 or len(schedule) != len(pairs):
            raise ValueError(text)
    except ValueError:
        raise _no_length(given, num_draft_tokens) from None
    return LengthByBatch(schedule)


def _no_length(found: object, num_draft_tokens: int) -> RequestError:
    return RequestError(
        f"draft length: expected 0 to {num_draft_tokens}, a schedule by batch size that begins at 1 (1:7,8:3),"
        f" adaptive or auto, found {found!r}"
    )


def _length(text: str, limit: int) -> int:
    length = int(text)
    if not 0 <= length <= limit:
        raise ValueError(text)
    return length
