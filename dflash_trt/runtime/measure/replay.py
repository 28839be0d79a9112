# SPDX-License-Identifier: Apache-2.0
"""Acceptance without the target: the greedy decode loop, walked along answers that `capture` recorded.

It is the loop that serves (`Decoder`, `LocalPair`), with a target that says what was recorded: the steps are those of
decoding wherever the taps are. No model is loaded; a file has its lm_head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dflash_trt.api.acceptance import Acceptance, Step
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.measure.features import FeatureFile, PromptFacts
from dflash_trt.runtime.measure.recorded_target import RecordedTarget
from dflash_trt.runtime.pair import LocalPair
from dflash_trt.runtime.request import Request

BATCH_SIZE = 8
"""Sequences at once. More fill the CPU no better, and each holds its taps."""
PREFILL_CHUNK = 4096
"""Prompt tokens a step: nobody waits for the others' prompts here."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding one prompt with the drafter comes to."""

    prompt: PromptFacts
    num_prompt_tokens: int
    num_output_tokens: int
    steps: list[Step]
    """The verify passes; the prefill, which emits the first token, is none."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass, as in `Completion`; None without one."""
        return Acceptance.of(self.steps).tau


def replay(
    features: FeatureFile,
    drafter: Drafter,
    *,
    numbers: Sequence[int] | None = None,
    draft_length: int | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """What greedy decoding of the captured prompts with `drafter` does, step by step, in the order of `numbers`.

    `numbers`: all by default. `draft_length`: how many proposals a pass verifies, K by default. As many run at once as
    the drafter has slots, which must be empty. Raises CheckpointError for impossible values in the file.
    """
    chosen = range(features.facts.num_sequences) if numbers is None else numbers
    requests = [_request(features, i, on_prompt) for i in chosen]
    num_slots = len(drafter.cache.lengths)
    longest = max((request.max_length for request in requests), default=0)
    length = FixedLength(drafter.spec.num_draft_tokens if draft_length is None else draft_length)
    pair = LocalPair(RecordedTarget(features, chosen), drafter)
    decoder = Decoder(pair, SlotPool.for_each_slot(num_slots, longest), length, prefill_chunk=PREFILL_CHUNK)
    decoder.run(requests)
    return [
        Replayed(
            prompt=features.facts.prompts[i],
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.token_ids),
            steps=request.steps,
        )
        for i, request in zip(chosen, requests, strict=True)
    ]


def _request(features: FeatureFile, i: int, on_prompt: Callable[[], None]) -> Request:
    params = SamplingParams(max_tokens=features.facts.max_tokens)
    request = Request(
        prompt_ids=features.prompt(i).tolist(),
        params=params,
        sampler=params.sampler(),
        stop_ids=frozenset(features.facts.stop_token_ids),
    )
    request.on_progress = lambda request: on_prompt() if request.finished else None
    return request
