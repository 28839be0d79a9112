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
        self.num_rows = 0
        """That the kept passes hold, rejected ones too."""
        self.num_bytes = 0
        """Of the same."""
        self._passes: list[tuple[Sequence[Tensor], Segments]] = []
        self._counts: dict[int, int] = {}
        """Rows that wait, by slot."""
        self._first: dict[int, int] = {}
        """The pass with which they begin; an earlier one had them of a request that has gone."""

    def count(self, slot: int) -> int:
        """Rows of a slot that wait."""
        return self._counts.get(slot, 0)

    def add(self, tapped: Sequence[Tensor], segments: Segments) -> None:
        """Keeps a pass's tapped hidden states, [R, H] each, of R rows in all segments."""
        counts, first = self._counts, self._first
        for slot, num_committed, num_rejected in segments:
            if slot in counts:
                counts[slot] += num_committed
            elif num_committed:
                counts[slot], first[slot] = num_committed, len(self._passes)
            self.num_rows += num_committed + num_rejected
        self._passes.append((tapped, segments))
        self.num_bytes += sum(tap.nbytes for tap in tapped)

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Slots, how many rows each gets, and the rows [T, A*H], slot by slot; None for no row. Nothing waits then."""
        slots, counts, tapped = self._take()
        return slots, counts, side_by_side(tapped) if tapped else None

    def compact(self) -> None:
        """Lets go of rows that no slot waits for: rejected ones, and those of slots that were dropped."""
        slots, counts, tapped = self._take()
        if tapped:
            self.add([tap.clone() for tap in tapped], [(slot, n, 0) for slot, n in zip(slots, counts, strict=True)])

    def _take(self) -> tuple[list[int], list[int], list[Tensor]]:
        """The same, its rows [T, H] by tap; no tap for no row."""
        rows = self._rows()
        order = [row for of_slot in rows.values() for row in of_slot]
        tapped: list[Tensor] = []
        if order:
            each = zip(*(tapped for tapped, _ in self._passes), strict=True)
            tapped = [taps[0] if len(taps) == 1 else torch.cat(taps) for taps in each]
            if len(order) < self.num_rows or order != list(range(len(order))):
                index = torch.from_numpy(np.array(order)).to(tapped[0].device)
                tapped = [taps.index_select(0, index) for taps in tapped]
        self._passes, self._counts, self._first, self.num_rows, self.num_bytes = [], {}, {}, 0, 0
        return list(rows), [len(of_slot) for of_slot in rows.values()], tapped

    def _rows(self) -> dict[int, list[int]]:
        """By slot: those that wait, in the passes end to end."""
        rows: defaultdict[int, list[int]] = defaultdict(list)
        begin = 0
        for number, (_, segments) in enumerate(self._passes):
            for slot, num_committed, num_rejected in segments:
                if num_committed and number >= self._first.get(slot, len(self._passes)):
                    rows[slot] += range(begin, begin + num_committed)
                begin += num_committed + num_rejected
        return rows

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        if self._counts.pop(slot, None) is not None:
            del self._first[slot]
