# SPDX-License-Identifier: Apache-2.0
"""What each request brings to a step of the decode loop, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.runtime.accept import accept, add_prompt_logprobs, argmax_and_finite
from dflash_trt.runtime.drafter.proposals import Proposals
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Segment

if TYPE_CHECKING:
    from torch import Tensor

NO_PROPOSALS = Proposals([])


class StepInput(msgspec.Struct, frozen=True):
    """What a request brings to a step: a chunk of its prompt, or its last token and the proposals behind it."""

    slot: int
    request: Request
    token_ids: Sequence[int]
    drafted: Proposals
    num_logits: int
    """Rows that tokens are drawn from."""
    num_prompt_logits: int = 0
    """Rows in front of them, for log probabilities of the prompt."""

    @property
    def proposals(self) -> Sequence[int]:
        return self.drafted.token_ids

    @property
    def segment(self) -> Segment:
        return Segment(slot=self.slot, token_ids=self.token_ids, num_logits=self.num_prompt_logits + self.num_logits)

    def num_committed(self, accepted: Sequence[int]) -> int:
        """Its tokens that become context when `accepted` came of it: all but the rejected proposals."""
        num_accepted = max(0, len(accepted) - 1)
        return len(self.token_ids) - len(self.proposals) + num_accepted


def accept_parts(parts: Sequence[StepInput], logits: Tensor) -> list[list[int]]:
    """The tokens that the target emits for each part: accepted proposals and one more, or none inside a prompt.

    A row that is not finite ends the block before it, and a part that begins with one gets no token: plain decoding
    would meet it, if at all, as the first row of a later step.
    """
    tokens, finite = argmax_and_finite(logits)
    all_finite = all(finite)
    accepted, begin = [], 0
    for part in parts:
        if part.num_prompt_logits:
            add_prompt_logprobs(part.request, logits, begin, part.num_prompt_logits)
            begin += part.num_prompt_logits
        end = begin + part.num_logits
        num_rows = part.num_logits if all_finite else len(list(takewhile(bool, finite[begin:end])))
        proposals = part.drafted.first(max(0, num_rows - 1))
        accepted.append(accept(part.request, proposals, logits, begin, tokens[begin : begin + num_rows]))
        begin = end
    return accepted
