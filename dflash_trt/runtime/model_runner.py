# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as one: what a step of the decode loop does with them, for all its requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dflash_trt import _C
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.targets.target import Segment, Target, side_by_side

MAX_ROWS = 256
"""Rows that become context in one pass: as many as a chunk of a prompt."""


class ModelRunner:
    """Target and perhaps drafter: what a step of the decode loop does with them."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        if drafter is not None:
            drafter.borrow(target)
        self._segments: Sequence[Segment] = ()
        self._tapped: Sequence[torch.Tensor] = ()

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """Gives an empty slot its pages of both caches; its first `num_tokens` tokens are in them already."""
        self._target.reserve(slot, pages, num_tokens)
        if self._drafter is not None:
            self._drafter.reserve(slot, pages, num_tokens)

    @property
    def drafts_ahead(self) -> bool:
        """Whether `draft` returns before the proposals are there."""
        return self._drafter is not None and self._drafter.is_asynchronous

    @property
    def draws_proposals(self) -> bool:
        """Whether `draft` can draw its proposals."""
        return self._drafter is not None and self._drafter.scorer is not None

    def draftable(self, slots: Sequence[int]) -> list[int]:
        """Slots that the drafter can continue."""
        return [] if self._drafter is None else self._drafter.draftable(slots)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], draft_length: int, draws: Sequence[Draw | None] = ()
    ) -> Callable[[], list[Proposals]]:
        """Starts a pass for `draft_length` proposals, 1 to K, for each slot, as `Drafter.start` does."""
        assert self._drafter is not None, "there is no drafter"
        return self._drafter.start(slots, anchors, draft_length, draws)

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target; logits [sum of num_logits, V] FLOAT. Keeps the taps until `commit`, which follows."""
        verified = self._target.verify(segments, with_taps=self._drafter is not None)
        self._segments, self._tapped = segments, verified.tapped
        return verified.logits

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Keeps the first num_tokens[i] tokens of the last pass's segment i in both caches; rolls the rest back."""
        rollback = self._target.rollback
        for segment, count in zip(self._segments, num_tokens, strict=True):
            rollback(segment.slot, len(segment.token_ids) - count)
        if (drafter := self._drafter) is not None:  # tokens beyond its positions are left out
            slots = [segment.slot for segment in self._segments]
            num_rows = [len(segment.token_ids) for segment in self._segments]
            taps, fitting = side_by_side(self._tapped), drafter.fitting(slots, num_tokens)
            for owners, counts, rows in _C.row_passes(slots, num_rows, fitting, MAX_ROWS):
                drafter.inject(owners, counts, taps, rows)
        self._segments, self._tapped = (), ()  # an idle runner keeps no request in memory

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._target.release(slot)
        if self._drafter is not None:
            self._drafter.release(slot)
