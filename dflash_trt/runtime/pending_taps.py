# SPDX-License-Identifier: Apache-2.0
"""Taps of committed tokens that are not the drafter's context yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_trt.runtime.targets.target import side_by_side

NO_SLOT = -1
"""Whose row a rejected token's is."""
MAX_PASSES = 32
"""That wait as they were tapped: what joins them costs each of them little."""

Part = tuple[Sequence[Tensor], npt.NDArray[np.int64]]
"""Tapped hidden states, side by side [R, A*H], and the slots [R] that wait for the rows, or NO_SLOT."""


class PendingTaps:
    """Rows in the order of their passes: who never drafts never pays for its own.

    Where nothing drafts this runs in each step, so a pass's tensors wait until there are MAX_PASSES to join, and so do
    those that were joined: each row is copied a few times. Not for longer: their memory is what the next pass would use
    again, and objects by the thousand set off Python's garbage collector, which goes through all that was imported.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all rows, nobody's too."""
        self._levels: list[list[Part]] = [[]]
        """Passes, what they were joined to, what that was joined to, ...: the newest first, each in order."""

    def add(self, tapped: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Keeps a pass's A tapped hidden states, [R, H] or [1, R, H] each, for the slots that own the rows."""
        self._levels[0].append((tapped, np.array(owners)))
        self.num_bytes += len(tapped) * tapped[0].nbytes
        for level, parts in enumerate(self._levels):
            if len(parts) < MAX_PASSES:
                return
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(self._joined(parts))
            parts.clear()

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        for _, owners in chain(*self._levels):
            owners[owners == slot] = NO_SLOT

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Slots, how many rows each gets, and the rows [T, A*H], slot by slot; None for no row. Nothing waits then."""
        self.compact()
        (parts,) = self._levels
        self.num_bytes, self._levels = 0, [[]]
        if not parts or not len(parts[0][1]):
            return [], [], None
        ((taps,), owners) = parts[0]
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(owners.tolist()):
            numbers[slot].append(number)
        order = [*chain.from_iterable(numbers.values())]
        if order != list(range(len(order))):
            taps = taps.index_select(0, torch.from_numpy(np.array(order)).to(taps.device))
        return list(numbers), [len(own) for own in numbers.values()], taps

    def compact(self) -> None:
        """Lets go of rows that no slot waits for: rejected ones, and those of slots that were dropped."""
        parts = [*chain.from_iterable(reversed(self._levels))]
        self._levels = [[self._joined(parts)] if parts else []]

    def _joined(self, parts: Sequence[Part]) -> Part:
        """The rows of `parts` that a slot waits for, as one tensor."""
        rows = [side_by_side(tapped) for tapped, _ in parts]
        taps = rows[0] if len(rows) == 1 else torch.cat(rows)
        owners = np.concatenate([owners for _, owners in parts])
        waiting = np.flatnonzero(owners != NO_SLOT)
        if len(waiting) < len(owners):
            self.num_bytes -= taps.nbytes
            taps, owners = taps.index_select(0, torch.from_numpy(waiting).to(taps.device)), owners[waiting]
            self.num_bytes += taps.nbytes
        return [taps], owners
