# SPDX-License-Identifier: Apache-2.0
"""The decode loop: prefill -> inject -> draft -> verify -> accept -> inject (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_trt._C import accept_greedy
from dflash_trt.drafter.protocol import Drafter
from dflash_trt.target.protocol import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one pass of the target emitted."""

    token_ids: list[int]
    """Accepted drafts and the bonus token, cut after a stop token; for the prefill the first token."""
    proposed: int = 0
    """Draft tokens that the pass verified."""
    accepted: int = 0
    """Draft tokens among `token_ids`."""


def speculative_decode(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> Iterator[Step]:
    """Greedy decoding of one prompt: the tokens of plain greedy decoding, in fewer passes of the target.

    Yields the prefill's step and one step per verify pass, until a stop token or `max_new_tokens` tokens.
    """
    slot, mask = 0, drafter.spec.mask_token_id
    drafter.release(slot)
    verified = target.prefill(prompt_ids)
    drafter.inject(slot, verified.taps)
    token = int(verified.next_tokens[-1])
    yield Step(token_ids=[token])

    remaining = max_new_tokens - 1
    while remaining > 0 and token not in stop_ids:
        # No proposal can be emitted beyond the limit, so none is verified there.
        num_proposals = min(drafter.spec.num_draft_tokens, remaining - 1)
        proposals: list[int] = []
        if num_proposals:
            block = [token] + [mask] * drafter.spec.num_draft_tokens
            hidden = drafter.draft(slot, target.embed(block))
            # Row 0 predicts the token already known; proposals begin at row 1.
            proposals = target.predict(hidden[1 : 1 + num_proposals]).tolist()

        verified = target.verify([token, *proposals])
        next_tokens = verified.next_tokens.tolist()
        accepted = accept_greedy(proposals, next_tokens)
        target.rollback(num_proposals - accepted)
        # Only what the target verified becomes context: the anchor and the accepted drafts.
        drafter.inject(slot, verified.taps[: accepted + 1])

        emitted = _until_stop(next_tokens[: accepted + 1], stop_ids)
        token = emitted[-1]
        remaining -= len(emitted)
        yield Step(token_ids=emitted, proposed=num_proposals, accepted=min(accepted, len(emitted)))


def plain_decode(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> Iterator[Step]:
    """Greedy decoding without a drafter: one token a pass."""
    token = int(target.prefill(prompt_ids).next_tokens[-1])
    yield Step(token_ids=[token])
    for _ in range(max_new_tokens - 1):
        if token in stop_ids:
            return
        token = int(target.verify([token]).next_tokens[-1])
        target.rollback(0)
        yield Step(token_ids=[token])


def _until_stop(token_ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: index + 1]
    return token_ids
