# SPDX-License-Identifier: Apache-2.0
"""The requests that take part in a step, and the part of each of them."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Segment

NO_PROPOSALS = Proposals([])


class Batch:
    """Running requests by what a step does with them: kept while none joins, leaves or goes on from its prompt."""

    def __init__(self, running: Mapping[int, Request]) -> None:
        self.clients = [request.client for request in running.values()]
        """Client of each request."""
        self.reading = [(slot, request) for slot, request in running.items() if request.num_unread]
        """Slots and requests whose prompts are still being read, in the order of admission."""
        going = ((slot, running[slot]) for slot in sorted(running))
        self.decoding = {slot: each for slot, each in going if not each.num_unread and each.ending is None}
        """Requests whose prompts have been read and whose answers go on, by slot, in the order of slots."""
        decoding = self.decoding.values()
        self.answers, self.asked = [each.answer for each in decoding], [each.params.draft_length for each in decoding]
        """Answer of each of them, and the draft length that it asks for."""
        self.guided = [(place, *each) for place, each in enumerate(self.decoding.items()) if each[1].processors]
        """Place, slot and request of those with logits processors."""


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
