# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as one: what a step of the decode loop does with them, for all its requests at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from dflash_trt.runtime.accept import argmax
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.proposals import Draw, Proposals
from dflash_trt.runtime.pending_taps import NO_SLOT, PendingTaps
from dflash_trt.runtime.targets.target import Segment, Target

MAX_PENDING_BYTES = 2**25
"""Of taps whose rows are not context yet: what ends before it drafts never pays for its own."""
MAX_ROWS = 256
"""That become context in one pass: as many as a chunk of a prompt."""


class Pair(Protocol):
    """A target and perhaps its drafter, on one process or on the ranks of several."""

    def claim(self) -> bool:
        """Whether nobody else has used the models' pages since this pair last asked; from now on it does."""

    def num_written(self, slot: int) -> int:
        """Tokens of the slot's sequence that are in both caches for good."""

    def catch_up(self) -> None:
        """Brings the drafter's context to what the target has committed."""

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """Gives an empty slot its pages of both caches; its first `num_tokens` tokens are in them already."""

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        """`num_tokens` proposals, 1 to K, that follow the last verified tokens `anchors` of each of `slots`.

        Greedy, but where `draws` has a Draw for a slot and the drafter knows distributions.
        """

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target; logits [sum of num_logits, V] FLOAT. A `commit` follows."""

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Makes the first num_tokens[i] of the last pass's segment i context, and rolls the rest back."""

    def release(self, slot: int) -> None:
        """Empties a slot."""


class LocalPair:
    """Target and drafter in this process; without a drafter, what plain decoding needs."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        self._segments: Sequence[Segment] = ()
        self._tapped: Sequence[torch.Tensor] = ()
        """Of the last pass."""
        self._pending = PendingTaps()
        """They become context before a slot drafts."""
        self._user = object()
        self._written: defaultdict[int, int] = defaultdict(int)
        """Tokens by slot that are in both caches for good."""

    def claim(self) -> bool:
        """Whether nobody else has used the models' pages since this pair last asked."""
        was_there = self._target.claim(self._user)
        return (self._drafter is None or self._drafter.claim(self._user)) and was_there

    def num_written(self, slot: int) -> int:
        """The target's committed tokens, less those that are not yet the drafter's context."""
        return self._written[slot]

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """The same pages for target and drafter."""
        self._written[slot] = num_tokens
        self._target.reserve(slot, pages, num_tokens)
        if self._drafter is not None:
            self._drafter.reserve(slot, pages, num_tokens)

    @torch.inference_mode()
    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        """`num_tokens` proposals for each slot from one pass over the blocks [anchor, mask, mask, ...]."""
        assert self._drafter is not None, "there is no drafter"
        self.catch_up()
        spec, anchor_ids = self._drafter.spec, torch.from_numpy(np.array(anchors))
        embeds = self._drafter.embedding.blocks(anchor_ids, spec.block_size, self._target.embed)
        if spec.num_candidates is not None:
            lattice = self._drafter.candidates(slots, embeds, anchor_ids, num_tokens, self._target.logits)
            return lattice.walk(draws)
        if spec.has_own_head:
            return [Proposals(row) for row in self._drafter.propose(slots, embeds)[:, :num_tokens].tolist()]
        hidden = self._drafter.draft(slots, embeds)
        first = spec.first_proposing_row
        logits = self._target.logits(hidden[:, first : first + num_tokens])
        tokens = argmax(logits.flatten(0, 1))
        return [Proposals(tokens[begin : begin + num_tokens]) for begin in range(0, len(tokens), num_tokens)]

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target; the taps stay here until `commit`."""
        verified = self._target.verify(segments, with_taps=self._drafter is not None)
        self._segments, self._tapped = segments, verified.tapped
        return verified.logits

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Rolls the target back behind what was accepted, and keeps its taps for the drafter's context."""
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
        """Makes all that is pending context."""
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
        """Empties a slot of both."""
        self._target.release(slot)
        self._written.pop(slot, None)
        self._pending.drop(slot)
        if self._drafter is not None:
            self._drafter.release(slot)
