# SPDX-License-Identifier: Apache-2.0
"""Token counts and measurements of answers."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import Completion
from dflash_trt.runtime.server.answer.bodies import Metrics, SpeculativeDecoding, Usage
from dflash_trt.runtime.server.answer.choice import Choice


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Usage:
    """Token counts of all prompts, each counted once, and of all sequences so far."""
    num_generated = sum(choice.num_generated_tokens for choice in choices)
    counts = Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=num_prompt_tokens + num_generated,
    )
    if all(choice.completion is not None for choice in choices):
        counts.prompt_tokens_details = {"cached_tokens": sum(choice.num_cached_tokens for choice in choices)}
    if num_reasoning := sum(choice.num_reasoning_tokens for choice in choices):
        counts.completion_tokens_details = {"reasoning_tokens": num_reasoning}
    return counts


def completion_metrics(completion: Completion, num_draft_tokens: int) -> Metrics:
    """Metrics of one sequence."""
    ttft, queue, acceptance = completion.ttft_seconds, completion.queue_seconds, completion.acceptance
    generation = None if ttft is None else completion.seconds - ttft
    after_first = len(completion.token_ids) - 1
    return Metrics(
        time_to_first_token_ms=None if ttft is None or queue is None else 1000 * (ttft - queue),
        generation_time_ms=_ms(generation),
        queue_time_ms=_ms(queue),
        mean_itl_ms=_ms(completion.itl_seconds),
        tokens_per_second=after_first / generation if generation and after_first > 0 else None,
        speculative_decoding=None if acceptance is None else _speculative_decoding(acceptance, num_draft_tokens),
    )


def _speculative_decoding(acceptance: Acceptance, num_draft_tokens: int) -> SpeculativeDecoding:
    at_least = [acceptance.drafting_passes, *acceptance.accepted_by_position]
    at_least += [0] * (num_draft_tokens + 2 - len(at_least))
    return SpeculativeDecoding(
        mean_acceptance_length=acceptance.tau_of_drafting_passes,
        draft_acceptance_rate=acceptance.accepted / acceptance.proposed if acceptance.proposed else None,
        acceptance_histogram=[at_least[j] - at_least[j + 1] for j in range(num_draft_tokens + 1)],
        num_spec_steps=acceptance.drafting_passes,
        num_accepted_draft_tokens=acceptance.accepted,
        num_draft_tokens=acceptance.proposed,
        num_spec_tokens=num_draft_tokens,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
