# SPDX-License-Identifier: Apache-2.0
"""Policy of which clients take part in a step, where a large batch slows it down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dflash_trt.runtime.policy.step_record import StepRecord

SLOWDOWN = 2.0
"""Factor by which others may lengthen the steps of the clients with the fewest requests."""
WEIGHT = 0.3
"""Weight of the latest step in the averages of step times."""
PROBE_STEPS = 16
"""Steps of all requests after which one without the others is measured again."""


class StepShare:
    """Splits time between the clients with the fewest running requests, and all others.

    The former take part in every step. The others do as long as steps are on average at most SLOWDOWN times as long
    as without them: always where a large batch costs little, as on a GPU; in some steps where it costs much.
    """

    def __init__(self) -> None:
        self._few = frozenset[str]()
        self._few_seconds: float | None = None
        self._all_seconds = 0.0
        self._saved = 0.0
        """Seconds by which past steps were shorter than SLOWDOWN allows."""
        self._num_joint = 0
        self._is_joint = True

    def choose(self, clients: Sequence[str]) -> frozenset[str]:
        """Clients that take part in the next step, by the client of each running request."""
        everyone = few = frozenset(clients)
        if len(everyone) > 1:
            counts = Counter(clients)
            fewest = min(counts.values())
            few = frozenset(client for client, count in counts.items() if count == fewest)
        if few != self._few:
            self._few, self._few_seconds, self._saved, self._num_joint = few, None, 0.0, 0
        self._is_joint = len(few) == len(everyone) or self._others_may_join()
        return everyone if self._is_joint else few

    def _others_may_join(self) -> bool:
        if self._few_seconds is None or self._num_joint == PROBE_STEPS:
            return False
        return self._saved + SLOWDOWN * self._few_seconds >= self._all_seconds

    def observe(self, step: StepRecord) -> None:
        """Learns how long the chosen step took."""
        seconds = step.seconds
        if self._is_joint:
            self._all_seconds += WEIGHT * (seconds - self._all_seconds)
            self._num_joint += 1
        else:
            self._few_seconds = (
                seconds if self._few_seconds is None else self._few_seconds + WEIGHT * (seconds - self._few_seconds)
            )
            self._num_joint = 0
        if self._few_seconds is not None:
            saved = self._saved + SLOWDOWN * self._few_seconds - seconds
            self._saved = min(saved, self._all_seconds)
