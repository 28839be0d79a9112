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

from dflash_trt.targets.target import side_by_side

NO_SLOT = -1
"""Whose row a rejected token's is."""
MAX_PASSES = 32
"""That wait as they were tapped: what joins them costs each of them little."""
FIRST_ROWS = 256
"""Room at the beginning: for a chunk of a prompt."""


class PendingTaps:
    """Rows in the order of their passes, in one buffer: who never drafts never pays for its own.

    Where nothing drafts this runs in each step, so a pass's tensors wait until there are some to join. Not for longer:
    their memory is what the next pass would use again, and objects by the thousand set off Python's garbage collector,
    which goes through all that has been imported.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of all rows, nobody's too."""
        self._passes: list[tuple[Sequence[Tensor], list[int]]] = []
        """The last ones, which are not in the buffer yet, and whose their rows are."""
        self._rows = torch.empty(0, 0)
        """[C, A*H], of which the first `_num_rows` are taken."""
        self._owners: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """[C]: the slots that wait for the rows, or NO_SLOT."""
        self._num_rows = 0

    def add(self, tapped: Sequence[Tensor], owners: list[int]) -> None:
        """Keeps a pass's A tapped hidden states, [R, H] or [1, R, H] each, for the slots that own the rows."""
        self._passes.append((tapped, owners))
        self.num_bytes += len(tapped) * tapped[0].nbytes
        if len(self._passes) == MAX_PASSES:
            self._join()

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        before = self._owners[: self._num_rows]
        before[before == slot] = NO_SLOT
        for _, owners in self._passes:
            owners[:] = [NO_SLOT if owner == slot else owner for owner in owners]

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Slots, how many rows each gets, and the rows [T, A*H], slot by slot; None for no row. Nothing waits then.

        The rows are there until something is added.
        """
        if self._num_rows:
            self._join()
            owners, taps = self._owners[: self._num_rows].tolist(), self._rows[: self._num_rows]
        else:
            owners, joined = self._take_passes()
            taps = side_by_side(joined) if joined else self._rows
        self._num_rows = self.num_bytes = 0
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(owners):
            numbers[slot].append(number)
        numbers.pop(NO_SLOT, None)
        order = [*chain.from_iterable(numbers.values())]
        if order == list(range(len(order))):
            taps = taps[: len(order)]
        else:
            taps = taps.index_select(0, torch.from_numpy(np.array(order)).to(taps.device))
        return list(numbers), [len(own) for own in numbers.values()], taps if order else None

    def compact(self) -> None:
        """Lets go of rows that no slot waits for: rejected ones, and those of slots that were dropped."""
        self._join()
        waiting = np.flatnonzero(self._owners[: self._num_rows] != NO_SLOT)
        self._rows[: len(waiting)] = self._rows.index_select(0, torch.from_numpy(waiting).to(self._rows.device))
        self._owners[: len(waiting)] = self._owners[waiting]
        self._set_num_rows(len(waiting))

    def _join(self) -> None:
        """Moves the last passes into the buffer."""
        owners, joined = self._take_passes()
        if not owners:
            return
        taps = [tap.flatten(0, -2) for tap in joined]
        if len(owners) > len(self._owners) - self._num_rows:
            self._make_room(taps)
        begin, end = self._num_rows, self._num_rows + len(owners)
        torch.cat(taps, dim=-1, out=self._rows[begin:end])
        self._owners[begin:end] = owners
        self._set_num_rows(end)

    def _take_passes(self) -> tuple[list[int], list[Tensor]]:
        """Whose each row of the last passes is, and their A taps, [R, H] or [1, R, H]."""
        passes, self._passes = self._passes, []
        owners = [*chain.from_iterable(own for _, own in passes)]
        each = zip(*(tapped for tapped, _ in passes), strict=True)
        return owners, [tap[0] if len(tap) == 1 else torch.cat(tap, dim=-2) for tap in each]

    def _set_num_rows(self, number: int) -> None:
        """Of the buffer, which is all there is then."""
        self._num_rows, self.num_bytes = number, self._rows[:number].nbytes

    def _make_room(self, taps: Sequence[Tensor]) -> None:
        """For more rows in the buffer."""
        if self._num_rows:
            self.compact()
        kept, needed = self._num_rows, self._num_rows + len(taps[0])
        if 2 * needed <= len(self._owners):  # else it would soon be full again
            return
        rows, owners, size = self._rows, self._owners, max(FIRST_ROWS, 2 * needed)
        width = sum(tap.shape[1] for tap in taps)
        with torch.inference_mode(False):  # others may write it outside inference mode
            self._rows = torch.empty(size, width, dtype=taps[0].dtype, device=taps[0].device)
        self._owners = np.empty(size, np.int64)
        self._owners[:kept] = owners[:kept]
        if kept:
            self._rows[:kept] = rows[:kept]
