# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as one: what a step of the decode loop does with them, for all its requests at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_trt.device.upload import uploaded
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.accept import argmax
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.targets.target import Segment, Target, side_by_side

MAX_PENDING_BYTES = 2**25
"""Limit on deferred taps; a request that never drafts never pays for injection."""
MAX_ROWS = 256
"""Rows that become context in one pass: as many as a chunk of a prompt."""
NO_SLOT = -1
"""Owner of a rejected token's row."""
MAX_PASSES = 32
"""Passes kept before they are concatenated; amortises the copy."""


class ModelRunner:
    """Target and perhaps drafter: what a step of the decode loop does with them."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        self._segments: Sequence[Segment] = ()
        self._tapped: Sequence[torch.Tensor] = ()
        self._pending = PendingTaps()
        """Taps that become context before a slot drafts."""
        self._written: defaultdict[int, int] = defaultdict(int)
        """Tokens by slot that are in both caches, so not those whose taps are pending."""

    def num_written(self, slot: int) -> int:
        """Tokens of the slot's sequence that are in both caches for good."""
        return self._written[slot]

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """Gives an empty slot its pages of both caches; its first `num_tokens` tokens are in them already."""
        self._written[slot] = num_tokens
        self._target.reserve(slot, pages, num_tokens)
        if self._drafter is not None:
            self._drafter.reserve(slot, pages, num_tokens)

    @torch.inference_mode()
    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], draft_length: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        """`draft_length` proposals, 1 to K, of one pass over the blocks [anchor, mask, mask, ...] of `slots`.

        Greedy, except where `draws` has a Draw for a slot and the drafter knows distributions.
        """
        assert self._drafter is not None, "there is no drafter"
        self.catch_up()
        spec, anchor_ids = self._drafter.spec, torch.from_numpy(np.array(anchors))
        embeds = self._drafter.embedding.blocks(anchor_ids, spec.block_size, self._target.embed)
        if spec.num_candidates is not None:
            lattice = self._drafter.candidates(slots, embeds, anchor_ids, draft_length, self._target.logits)
            return lattice.walk(draws)
        if spec.has_own_head:
            return [Proposals(row) for row in self._drafter.propose(slots, embeds)[:, :draft_length].tolist()]
        hidden = self._drafter.draft(slots, embeds)
        first = spec.first_proposing_row
        logits = self._target.logits(hidden[:, first : first + draft_length])
        tokens = argmax(logits.flatten(0, 1))
        return [Proposals(tokens[begin : begin + draft_length]) for begin in range(0, len(tokens), draft_length)]

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target; logits [sum of num_logits, V] FLOAT. Keeps the taps until `commit`, which follows."""
        verified = self._target.verify(segments, with_taps=self._drafter is not None)
        self._segments, self._tapped = segments, verified.tapped
        return verified.logits

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Makes the first num_tokens[i] of the last pass's segment i context, and rolls the rest back."""
        owners: list[int] = []
        for segment, committed in zip(self._segments, num_tokens, strict=True):
            num_rejected = len(segment.token_ids) - committed
            self._target.rollback(segment.slot, num_rejected)
            owners += [segment.slot] * committed + [NO_SLOT] * num_rejected
        if self._drafter is None:
            self._note_written(zip((segment.slot for segment in self._segments), num_tokens, strict=True))
            return
        self._pending.add(self._tapped, owners)
        if self._pending.num_bytes > MAX_PENDING_BYTES:
            self._pending.compact()
            if self._pending.num_bytes > MAX_PENDING_BYTES // 2:
                self.catch_up()

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Brings the drafter's context to what the target has committed."""
        slots, counts, taps = self._pending.take()
        if self._drafter is None or taps is None:
            return
        self._note_written(zip(slots, counts, strict=True))
        if len(taps) <= MAX_ROWS:
            self._drafter.inject(slots, counts, taps)
            return
        owners = np.repeat(slots, counts)
        for begin in range(0, len(taps), MAX_ROWS):
            part = Counter(owners[begin : begin + MAX_ROWS].tolist())
            self._drafter.inject([*part], [*part.values()], taps[begin : begin + MAX_ROWS])

    def _note_written(self, counts: Iterable[tuple[int, int]]) -> None:
        for slot, num_tokens in counts:
            self._written[slot] += num_tokens

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._target.release(slot)
        self._written.pop(slot, None)
        self._pending.drop(slot)
        if self._drafter is not None:
            self._drafter.release(slot)


TapRows = tuple[Sequence[Tensor], npt.NDArray[np.int64]]
"""Tapped hidden states, side by side [R, A*H], and the slots [R] that wait for the rows, or NO_SLOT."""


class PendingTaps:
    """Taps of committed tokens that are not the drafter's context yet, in the order of their passes.

    Plain decoding adds to them in each step, so they are concatenated when MAX_PASSES passes have come. They do not
    wait for longer, because the next pass would use their memory again, and thousands of objects set off Python's
    garbage collector.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes held, rejected rows included."""
        self._parts: list[TapRows] = []

    def add(self, tapped: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Keeps a pass's A tapped hidden states, [R, H] or [1, R, H] each, for the slots that own the rows."""
        self._parts.append((tapped, np.array(owners)))
        self.num_bytes += len(tapped) * tapped[0].nbytes
        if len(self._parts) > MAX_PASSES:
            self.compact()

    def drop(self, slot: int) -> None:
        """Forgets a slot's rows."""
        for _, owners in self._parts:
            owners[owners == slot] = NO_SLOT

    def take(self) -> tuple[list[int], list[int], Tensor | None]:
        """Removes all rows; returns slots, how many rows each has, and the rows [T, A*H] slot by slot or None."""
        self.compact()
        parts, self.num_bytes, self._parts = self._parts, 0, []
        if not parts or not len(parts[0][1]):
            return [], [], None
        ((taps,), owners) = parts[0]
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(owners.tolist()):
            numbers[slot].append(number)
        order = [*chain.from_iterable(numbers.values())]
        if order != list(range(len(order))):
            taps = _rows(taps, np.array(order))
        return list(numbers), [len(own) for own in numbers.values()], taps

    def compact(self) -> None:
        """Joins what is held, and frees rows that no slot waits for: rejected ones, and those of dropped slots."""
        if not self._parts:
            return
        rows = [side_by_side(tapped) for tapped, _ in self._parts]
        taps = rows[0] if len(rows) == 1 else torch.cat(rows)
        owners = np.concatenate([owners for _, owners in self._parts])
        waiting = np.flatnonzero(owners != NO_SLOT)
        if len(waiting) < len(owners):
            taps, owners = _rows(taps, waiting), owners[waiting]
        self._parts, self.num_bytes = [([taps], owners)], taps.nbytes


def _rows(taps: Tensor, numbers: npt.NDArray[np.int64]) -> Tensor:
    return taps.index_select(0, uploaded(torch.from_numpy(numbers), taps.device))
