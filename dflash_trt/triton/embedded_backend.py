# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime behind Triton: `dflash_trt.LLM`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import dflash_trt
from dflash_trt.errors import RequestError
from dflash_trt.triton.request_inputs import Ask
from dflash_trt.triton.response import Answer, Ending

if TYPE_CHECKING:
    from dflash_trt import Completion, SamplingParams

DEFAULT_MAX_TOKENS = 32  # TensorRT-LLM's, so that a client sees no difference
SAME_NAMES = ("top_k", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")


class EmbeddedEngine:
    """Serves requests by one LLM."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._llm = dflash_trt.LLM(**arguments)

    async def answers(self, ask: Ask) -> AsyncGenerator[Answer, None]:
        """The answer as it grows."""
        arrived_ns = time.perf_counter_ns()
        echo = "" if ask.sampling.get("exclude_input_from_output", True) or ask.streaming else ask.prompt
        text = echo
        async with aclosing(self._llm.stream_async(ask.prompt, sampling_params(ask))) as chunks:
            async for chunk in chunks:
                text += chunk.text
                ending = None if chunk.completion is None else _ending(chunk.completion, arrived_ns)
                yield Answer(text, chunk.text, ending)

    def metrics(self) -> dict[str, float]:
        """The decoder's readings."""
        read = self._llm.metrics()
        return {
            "dflash_running_requests": read.running,
            "dflash_waiting_requests": read.waiting,
            "dflash_free_slots": read.free_slots,
            "dflash_output_tokens": read.output_tokens,
            "dflash_verify_steps": read.steps,
            "dflash_draft_tokens": read.proposed,
            "dflash_accepted_draft_tokens": read.accepted,
        }

    def close(self) -> None:
        """Ends the LLM's thread."""
        self._llm.close()


def sampling_params(ask: Ask) -> SamplingParams:
    """The request's settings in the words of this runtime, with TensorRT-LLM's defaults.

    Greedy where neither temperature, top_k nor top_p is given. Raises RequestError.
    """
    given = ask.sampling
    if given.get("best_of", 1) != 1:
        raise RequestError(f"sampling_param_best_of: expected 1, found {given['best_of']}")
    is_greedy = not given.keys() & {"temperature", "top_k", "top_p"}
    return dflash_trt.SamplingParams(
        max_tokens=given.get("max_tokens", DEFAULT_MAX_TOKENS),
        temperature=given.get("temperature", 0.0 if is_greedy else 1.0),
        logprobs="cumulative_logprob" in ask.returns,
        **{name: given[name] for name in SAME_NAMES if name in given},
    )


def _ending(completion: Completion, arrived_ns: int) -> Ending:
    return Ending(
        finish_reason=str(completion.finish_reason),
        stop_reason=None if completion.stop_reason is None else str(completion.stop_reason),
        cumulative_logprob=None if completion.logprobs is None else sum(completion.logprobs),
        perf_metrics=_perf_metrics(completion, arrived_ns),
    )


def _perf_metrics(completion: Completion, arrived_ns: int) -> dict[str, float | int]:
    times = {
        "first_scheduled_time_ns": completion.queue_seconds,
        "first_token_time_ns": completion.ttft_seconds or 0.0,
        "last_token_time_ns": completion.seconds,
    }
    return {
        "arrival_time_ns": arrived_ns,
        **{name: arrived_ns + round(seconds * 1e9) for name, seconds in times.items()},
        "acceptance_rate": completion.accepted / completion.proposed if completion.proposed else 0.0,
        "total_accepted_draft_tokens": completion.accepted,
        "total_draft_tokens": completion.proposed,
        "acceptance_length": completion.tau or 0.0,
        "num_output_tokens": len(completion.token_ids),
    }
