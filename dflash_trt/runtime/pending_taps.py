# SPDX-License-Identifier: Apache-2.0
"""Taps of committed tokens that are not the drafter's context yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_trt.targets.target import side_by_side

Segments = Sequence[tuple[int, int, int]]
"""Of a pass: slot, how many rows are committed, and how many behind them are not."""


class PendingTaps:
    """Whole passes as they were tapped, and who waits for them: who never drafts never pays for its own.

    Where nothing drafts this runs in each step, so all that can wait does: joining taps, and finding a slot's rows.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """That the kept passes hold, rejected rows too."""
        self._passes: list[tuple[Sequence[Tensor], Segments]] = []
        self._first: dict[int, int] = {}
        """By slot: the first pass that counts; earlier ones have rows of a request that has gone. 0 where none has."""
        self._counts: defaultdict[int, int] = defaultdict(int)
        """Rows that wait, by slot, of the first `_num_counted` passes."""
        self._num_counted = 0

    def count(self, slot: int) -> int:
        """Rows of a slot that wait."""
        for _, segments in self._passes[self._num_counted :]:
            for each, num_committed, _ in segments:
                self._counts[each] += num_committed
        self._num_counted = len(self._passes)
        return self._counts[slot]

    def add(self, tapped: Sequence[Tensor], segments: Segments) -> None:
        """Keeps a pass's tapped hidden states, [R, H] or [1, R, H] each, of R rows in all segments."""
        self._passes.append((tapped, segments))
        for tap in tapped:
            self.num_bytes += tap.nbytes

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Slots, how many rows each gets, and the rows [T, A*H], slot by slot; None for no row. Nothing waits then."""
        rows, num_rows = self._rows()
        order = [row for of_slot in rows.values() for row in of_slot]
        taps = None
        if order:
            each = zip(*(tapped for tapped, _ in self._passes), strict=True)
            taps = side_by_side([_end_to_end(passes) for passes in each])
            if order != list(range(num_rows)):
                taps = taps.index_select(0, torch.from_numpy(np.array(order)).to(taps.device))
        self._passes, self.num_bytes, self._num_counted = [], 0, 0
        self._first.clear()
        self._counts.clear()
        return list(rows), [len(of_slot) for of_slot in rows.values()], taps

    def compact(self) -> None:
        """Lets go of rows that no slot waits for: rejected ones, and those of slots that were dropped."""
        widths = [tap.shape[-1] for tapped, _ in self._passes[:1] for tap in tapped]
        slots, counts, taps = self.take()
        if taps is not None:
            self.add(
                torch.split(taps.clone(), widths, dim=-1), [(slot, n, 0) for slot, n in zip(slots, counts, strict=True)]
            )

    def _rows(self) -> tuple[dict[int, list[int]], int]:
        """By slot: those that wait, in the passes end to end; and how many these hold."""
        rows: defaultdict[int, list[int]] = defaultdict(list)
        begin = 0
        for number, (_, segments) in enumerate(self._passes):
            for slot, num_committed, num_rejected in segments:
                if num_committed and number >= self._first.get(slot, 0):
                    rows[slot] += range(begin, begin + num_committed)
                begin += num_committed + num_rejected
        return rows, begin

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        if self._passes:
            self.count(slot)
            self._counts[slot], self._first[slot] = 0, len(self._passes)


def _end_to_end(taps: Sequence[Tensor]) -> Tensor:
    """One tap of all passes."""
    return taps[0] if len(taps) == 1 else torch.cat([tap.flatten(0, -2) for tap in taps])
