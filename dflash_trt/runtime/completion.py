# SPDX-License-Identifier: Apache-2.0
"""Runs a decode loop to its end and counts what the field reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target import TargetSpec
from dflash_trt.errors import RequestError
from dflash_trt.runtime.decode import Step


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one request and what they cost."""

    output_ids: list[int]
    """Emitted tokens, a final stop token included."""
    steps: int
    """Verify passes of the target; the prefill is none."""
    accepted: int
    """Draft tokens among the output."""
    proposed: int
    """Draft tokens that were verified."""
    tau: float | None
    """Tokens after the first / steps; none without a step."""
    seconds: float
    """Wall time, prefill included, model loading excluded."""


def complete(steps: Iterable[Step], on_tokens: Callable[[list[int]], None] | None = None) -> Completion:
    """Runs a decode loop; `on_tokens` sees each step's tokens as they come."""
    begin = time.perf_counter()
    output_ids: list[int] = []
    num_steps, proposed, accepted = -1, 0, 0  # the prefill's step does not count
    for step in steps:
        output_ids += step.token_ids
        num_steps += 1
        proposed += step.proposed
        accepted += step.accepted
        if on_tokens is not None:
            on_tokens(step.token_ids)
    return Completion(
        output_ids=output_ids,
        steps=num_steps,
        accepted=accepted,
        proposed=proposed,
        tau=(len(output_ids) - 1) / num_steps if num_steps else None,
        seconds=time.perf_counter() - begin,
    )


def check_request(prompt_ids: Sequence[int], max_new_tokens: int, draft: DraftSpec, target: TargetSpec) -> None:
    """Raises RequestError for a prompt that cannot be served to its last token."""
    if not prompt_ids:
        raise RequestError("prompt: expected at least one token, found an empty prompt")
    if wrong := [token for token in prompt_ids if not 0 <= token < target.vocab_size]:
        raise RequestError(f"prompt: expected token ids from 0 to {target.vocab_size - 1}, found {wrong[0]}")
    if draft.mask_token_id in prompt_ids:
        raise RequestError(f"prompt: expected text, found the draft's mask token {draft.mask_token_id}")
    limit = min(draft.max_position_embeddings, target.max_position_embeddings)
    if (length := len(prompt_ids) + max_new_tokens) > limit:
        raise RequestError(
            f"prompt: expected at most {limit} tokens (max_position_embeddings), found {len(prompt_ids)}"
            f" in the prompt + {max_new_tokens} new ones = {length}",
            hint="lower --max-new-tokens or shorten the prompt",
        )
