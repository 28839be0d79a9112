# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM behind Triton: `tensorrt_llm.LLM`, made from the arguments that trtllm-serve gets.

Its interface as NVIDIA's llmapi model uses it (triton_backend/all_models/llmapi, main, 2026). Not yet run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from importlib import import_module
from typing import Any

from dflash_trt.triton import mpi_ranks
from dflash_trt.triton.request_inputs import Ask
from dflash_trt.triton.response import Answer, Ending

KV_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
    "kv_cache_hit_rate": "kv_cache_hit_rate",
}
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")


class TrtllmEngine:
    """Serves requests by one LLM, whose ranks it spawns or finds in MPI's world."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        session = mpi_ranks.leader_session()
        self._tensorrt_llm: Any = import_module("tensorrt_llm")
        self._llm = self._tensorrt_llm.LLM(**arguments, **session)

    async def answers(self, ask: Ask) -> AsyncGenerator[Answer, None]:
        """The answer as it grows."""
        params = self._tensorrt_llm.SamplingParams(**sampling_arguments(ask))
        result = self._llm.generate_async(ask.prompt, params, streaming=ask.streaming)
        sent = 0
        try:
            async for state in result:
                output = state.outputs[0]
                ending = _ending(output) if state.finished else None
                yield Answer(output.text, output.text[sent:], ending)
                sent = len(output.text)
        finally:
            if not result.finished:
                result.abort()

    def metrics(self) -> dict[str, float]:
        """None: they would be per iteration, and TensorRT-LLM has its own ways to them."""
        return {}

    def close(self) -> None:
        """Ends the ranks."""
        self._llm.shutdown()


def sampling_arguments(ask: Ask) -> dict[str, Any]:
    """The arguments of tensorrt_llm.SamplingParams; what was not given is left to its defaults."""
    arguments = {**ask.sampling, "return_perf_metrics": "perf_metrics" in ask.returns}
    if "stop" in arguments:
        arguments["stop"] = list(arguments["stop"])
    if "cumulative_logprob" in ask.returns:
        arguments["logprobs"] = 0  # of the drawn token alone
    return arguments


def _ending(output: Any) -> Ending:
    return Ending(
        finish_reason=str(output.finish_reason),
        stop_reason=None if output.stop_reason is None else str(output.stop_reason),
        cumulative_logprob=output.cumulative_logprob,
        perf_metrics=_perf_metrics(output),
    )


def _perf_metrics(output: Any) -> dict[str, float | int]:
    metrics: dict[str, float | int] = {"num_output_tokens": len(output.token_ids)}
    measured = getattr(output, "request_perf_metrics", None)
    if not measured:
        return metrics
    drafts = measured.speculative_decoding
    metrics |= {name: getattr(measured.kv_cache_metrics, field) for name, field in KV_CACHE.items()}
    metrics |= {f"{name}_ns": round(getattr(measured.timing_metrics, name).total_seconds() * 1e9) for name in TIMES}
    metrics |= {
        "acceptance_rate": drafts.acceptance_rate,
        "total_accepted_draft_tokens": drafts.total_accepted_draft_tokens,
        "total_draft_tokens": drafts.total_draft_tokens,
    }
    return metrics
