# SPDX-License-Identifier: Apache-2.0
"""Policy of how many draft tokens a step verifies.

The drafter always fills its whole block; this decides how much of it the target verifies. Longer is not better: each
token costs, above all on mixture-of-experts targets at high batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_trt.runtime.policy.step_record import StepRecord


class DraftLength:
    """Decides how many of the K drafted tokens of each request a step verifies."""

    _explanation: str

    def lengths(self, asked: Sequence[int | None]) -> list[int]:
        """Drafts to verify for each request of a step that begins, of which each may have `asked` for a length."""
        if not asked:
            return []
        chosen = self.choose(len(asked))
        return [chosen if length is None else self.of_request(length, chosen) for length in asked]

    def choose(self, batch_size: int) -> int:
        """Draft length of the step, 0 (plain decoding) to K."""
        raise NotImplementedError

    def of_request(self, asked: int, chosen: int) -> int:
        """Draft length for a request that sets its own: min(asked, chosen), and `asked` itself under auto."""
        return min(asked, chosen)

    def cut_length(self, survival: Sequence[float]) -> int:
        """Number of leading drafts to verify, of drafts that survive with these probabilities.

        Each probability depends only on the tokens before its draft, so cutting leaves samples exact.
        """
        return len(survival)

    def observe(self, step: StepRecord) -> None:
        """Learns from a step when it ends."""

    def explain(self) -> str:
        """Current choice, and the reason for it."""
        return self._explanation


class LengthByBatch(DraftLength):
    """Draft length of the largest scheduled batch size, 1 among them, that the step reaches."""

    def __init__(self, schedule: Mapping[int, int]) -> None:
        self._schedule = dict(sorted(schedule.items(), reverse=True))
        self._explanation = ", ".join(f"{length} from batch size {begin}" for begin, length in sorted(schedule.items()))

    def choose(self, batch_size: int) -> int:
        return next(length for begin, length in self._schedule.items() if batch_size >= begin)


class FixedLength(LengthByBatch):
    """One draft length for all steps."""

    def __init__(self, length: int) -> None:
        super().__init__({1: length})
        self.length, self._explanation = length, f"{length}: fixed"
