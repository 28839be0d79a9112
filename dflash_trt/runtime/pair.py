# SPDX-License-Identifier: Apache-2.0
"""Target and drafter as one: what a step of the decode loop does with them, for all its requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from dflash_trt.drafter.drafter import Drafter
from dflash_trt.targets.target import Segment, Target


class Pair(Protocol):
    """A target and perhaps its drafter, on one process or on the ranks of several."""

    def draft(self, slots: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
        """Proposals [B, K] int64 that follow the last verified tokens `anchors` of `slots`; greedy."""

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
        self._taps: torch.Tensor

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
        """Proposals [B, K] int64 from one pass over the blocks [anchor, mask, mask, ...]."""
        assert self._drafter is not None, "there is no drafter"
        spec = self._drafter.spec
        masks = [spec.mask_token_id] * (spec.block_size - 1)
        blocks = torch.tensor([[anchor, *masks] for anchor in anchors])
        hidden = self._drafter.draft(slots, self._target.embed(blocks))
        # Row 0 predicts the token already known; proposals begin at row 1.
        return self._target.logits(hidden[:, 1:]).argmax(dim=-1)

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target; the taps stay here until `commit`."""
        verified = self._target.verify(segments, with_taps=self._drafter is not None)
        self._segments, self._taps = segments, verified.taps
        return verified.logits

    @torch.inference_mode()
    def commit(self, num_tokens: Sequence[int]) -> None:
        """Rolls the target back behind what was accepted, and injects its taps into the drafter's context."""
        rows: list[int] = []
        begin = 0
        for segment, committed in zip(self._segments, num_tokens, strict=True):
            self._target.rollback(segment.slot, len(segment.token_ids) - committed)
            rows += range(begin, begin + committed)
            begin += len(segment.token_ids)
        if self._drafter is not None and rows:
            is_prefix = rows[-1] == len(rows) - 1
            taps = self._taps[: len(rows)] if is_prefix else self._taps[rows]
            self._drafter.inject([segment.slot for segment in self._segments], num_tokens, taps)

    def release(self, slot: int) -> None:
        """Empties a slot of both."""
        self._target.release(slot)
        if self._drafter is not None:
            self._drafter.release(slot)
