# SPDX-License-Identifier: Apache-2.0
"""The part of one request in a step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime.policy.step_record import BlockRecord
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Segment

NO_PROPOSALS = Proposals([])


class StepInput(msgspec.Struct, frozen=True):
    """Chunk of a request's prompt, or a block: its last token and the proposals after it."""

    slot: int
    request: Request
    token_ids: Sequence[int]
    drafted: Proposals
    num_logits: int
    """Logits rows that tokens are drawn from."""
    num_prompt_logits: int = 0
    """Logits rows before those, for log probabilities of the prompt."""

    @classmethod
    def block(cls, slot: int, request: Request, proposals: Proposals) -> StepInput:
        """The last token of a request, and the proposals after it."""
        token_ids = [request.token_ids[-1], *proposals.token_ids]
        return cls(slot, request, token_ids, proposals, len(token_ids))

    @classmethod
    def chunk(cls, slot: int, request: Request, size: int) -> StepInput:
        """The next tokens, at most `size`, of a prompt that is still being read."""
        begin, context_ids = request.num_prefilled, request.context_ids
        chunk = context_ids[begin : begin + size]
        is_last = begin + len(chunk) == len(context_ids)
        num_prompt_logits = len(chunk) - is_last if request.needs_prompt_logprobs else 0
        return cls(slot, request, chunk, NO_PROPOSALS, int(is_last), num_prompt_logits)

    @property
    def proposals(self) -> Sequence[int]:
        return self.drafted.token_ids

    @property
    def segment(self) -> Segment:
        return Segment(slot=self.slot, token_ids=self.token_ids, num_logits=self.num_prompt_logits + self.num_logits)

    def num_committed(self, accepted: Sequence[int]) -> int:
        """Tokens that become context: all but the rejected proposals, given the `accepted` tokens."""
        num_accepted = max(0, len(accepted) - 1)
        return len(self.token_ids) - len(self.proposals) + num_accepted

    def has_failed(self, accepted: Sequence[int]) -> bool:
        """Whether a token was due, but its logits were not finite."""
        return self.num_logits > 0 and not accepted

    def record(self, accepted: Sequence[int]) -> BlockRecord:
        """Outcome of a block, for policies."""
        drafted, request = self.drafted, self.request
        return BlockRecord(
            proposed=0 if drafted.is_forced else len(drafted.token_ids),
            accepted=0 if drafted.is_forced else len(accepted) - 1,
            temperature=request.params.temperature,
            drawn=None if request.draw is None else drafted.candidate_ids is not None,
        )
