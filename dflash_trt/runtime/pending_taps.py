# SPDX-License-Identifier: Apache-2.0
"""Taps of committed tokens that are not the drafter's context yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class PendingTaps:
    """Whole passes, and which of their rows each slot's context gets: who never drafts never pays for its own."""

    def __init__(self) -> None:
        self.num_rows = 0
        """That the kept passes hold, rejected ones too."""
        self.num_bytes = 0
        """Of the same."""
        self._passes: list[Tensor] = []
        self._rows: dict[int, list[int]] = {}
        """By slot: rows of the passes, end to end."""

    def count(self, slot: int) -> int:
        """Rows of a slot that wait."""
        return len(self._rows.get(slot, ()))

    def add(self, taps: Tensor, segments: Sequence[tuple[int, int, int]]) -> None:
        """Keeps a pass's taps [R, A*H]; of each segment its slot, how many rows are committed, and how many behind
        them are not."""
        begin = self.num_rows
        for slot, num_committed, num_rejected in segments:
            if num_committed:
                self._rows.setdefault(slot, []).extend(range(begin, begin + num_committed))
            begin += num_committed + num_rejected
        self._passes.append(taps)
        self.num_rows = begin
        self.num_bytes += taps.nbytes

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Slots, how many rows each gets, and the rows [T, A*H], slot by slot; None for no row. Nothing waits then."""
        slots, counts = list(self._rows), [len(rows) for rows in self._rows.values()]
        order = [row for rows in self._rows.values() for row in rows]
        taps = None
        if order:
            taps = self._passes[0] if len(self._passes) == 1 else torch.cat(self._passes)
            if len(order) < self.num_rows or order != list(range(len(order))):
                taps = taps.index_select(0, torch.from_numpy(np.array(order)).to(taps.device))
        self._passes, self._rows, self.num_rows, self.num_bytes = [], {}, 0, 0
        return slots, counts, taps

    def compact(self) -> None:
        """Lets go of rows that no slot waits for: rejected ones, and those of slots that were dropped."""
        slots, counts, taps = self.take()
        if taps is not None:
            self.add(taps.clone(), [(slot, count, 0) for slot, count in zip(slots, counts, strict=True)])

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        self._rows.pop(slot, None)
