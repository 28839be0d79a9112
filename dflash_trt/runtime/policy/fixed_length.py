# SPDX-License-Identifier: Apache-2.0
"""Draft lengths that the user fixes: one number, or a schedule by batch size."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.runtime.policy.draft_length import DraftLength


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
