# SPDX-License-Identifier: Apache-2.0
"""The answers whose features are captured: the target decodes every prompt without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt and the target's answer."""

    token_ids: list[int]
    prompt_length: int


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    num_slots: int = 1,
    on_answer: Callable[[int, Answered], None] = lambda index, answered: None,
) -> list[Answered]:
    """Decodes every prompt, to a stop token (kept) or `max_tokens` tokens, `num_slots` at once; `seeds` by prompt.

    `on_answer` gets each answer with its prompt's index as soon as it is there.
    """
    asked = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed in seeds or [0] * len(prompts)
    ]
    requests = [
        Request(prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=stop_ids)
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    longest = max((request.max_length for request in requests), default=0)
    slots = SlotPool.for_each_slot(num_slots, longest)
    target.allocate(slots.num_tokens // TOKENS_PER_PAGE)
    decoder = Decoder(ModelRunner(target, None), slots, FixedLength(0))

    def answered(request: Request) -> Answered:
        return Answered(token_ids=[*request.prompt_ids, *request.token_ids], prompt_length=len(request.prompt_ids))

    def watch(index: int, request: Request) -> None:
        request.on_progress = lambda request: on_answer(index, answered(request)) if request.finished else None

    for index, request in enumerate(requests):
        watch(index, request)
    decoder.run(requests)
    return [answered(request) for request in requests]
