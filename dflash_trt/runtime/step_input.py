# SPDX-License-Identifier: Apache-2.0
"""The part of one request in a step."""

from __future__ import annotations

from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Segment

NO_PROPOSALS = Proposals([])


class StepInput(Segment, frozen=True, gc=False):
    """Chunk of a request's prompt, or a block: its last token and the proposals after it."""

    request: Request
    drafted: Proposals
    num_prompt_logits: int = 0
    """Rows of the logits for log probabilities of the prompt; tokens are drawn from those after them."""

    @classmethod
    def chunk(cls, slot: int, request: Request, size: int) -> StepInput:
        """The next tokens, at most `size`, of a prompt that is still being read."""
        begin, context_ids = request.num_prefilled, request.context_ids
        chunk = context_ids[begin : begin + size]
        is_last = begin + len(chunk) == len(context_ids)
        num_prompt_logits = len(chunk) - is_last if request.needs_prompt_logprobs else 0
        return cls(slot, chunk, num_prompt_logits + is_last, request, NO_PROPOSALS, num_prompt_logits)

    @property
    def num_drawn(self) -> int:
        """Rows of the logits that tokens are drawn from."""
        return self.num_logits - self.num_prompt_logits
