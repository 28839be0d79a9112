# SPDX-License-Identifier: Apache-2.0
"""Stands in for TensorRT-LLM, which no machine of the tests can install: what NVIDIA's llmapi model uses of it.

It answers with the prompt's words, and notes in $STAND_IN_NOTES what it was asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TIMES = {"arrival_time": 1, "first_scheduled_time": 2, "first_token_time": 3, "last_token_time": 4}
KV_CACHE = ("num_reused_blocks", "num_missed_blocks", "num_new_allocated_blocks", "num_total_allocated_blocks")


def note(**what: Any) -> None:
    with Path(os.environ["STAND_IN_NOTES"]).open("a") as file:
        file.write(json.dumps(what) + "\n")


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False


@dataclass
class CompletionOutput:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    request_perf_metrics: Any = None


class RequestOutput:
    def __init__(self, prompt: str, params: SamplingParams, streaming: bool) -> None:
        self._words = prompt.split()[: params.max_tokens]
        self._params = params
        self._streaming = streaming
        self._aborted = False
        self.finished = False
        self.outputs = [CompletionOutput()]

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        output = self.outputs[0]
        for index, word in enumerate(self._words):
            await asyncio.sleep(0.001)
            output.text += f" {word}"
            output.token_ids.append(index)
            if index + 1 == len(self._words):
                self._finish(output)
            if self._streaming or self.finished:
                yield self

    def abort(self) -> None:
        note(aborted=len(self.outputs[0].token_ids))

    def _finish(self, output: CompletionOutput) -> None:
        self.finished = True
        output.finish_reason = "length"
        if self._params.logprobs is not None:
            output.cumulative_logprob = -1.5
        if self._params.return_perf_metrics:
            output.request_perf_metrics = SimpleNamespace(
                kv_cache_metrics=SimpleNamespace(kv_cache_hit_rate=0.25, **dict.fromkeys(KV_CACHE, 3)),
                timing_metrics=SimpleNamespace(**{name: timedelta(seconds=n) for name, n in TIMES.items()}),
                speculative_decoding=SimpleNamespace(
                    acceptance_rate=0.75, total_accepted_draft_tokens=30, total_draft_tokens=40
                ),
            )


class LLM:
    def __init__(self, *, _mpi_session: Any = None, **arguments: Any) -> None:
        self._session = _mpi_session
        workers = [] if _mpi_session is None else _mpi_session.run_everywhere(work_as_rank)
        note(arguments=arguments, workers=workers, server=os.getppid())

    def generate_async(self, inputs: str, sampling_params: SamplingParams, *, streaming: bool = False) -> RequestOutput:
        note(params={key: value for key, value in vars(sampling_params).items() if value is not None})
        return RequestOutput(inputs, sampling_params, streaming)

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.shutdown()
        note(shutdown=True)


def work_as_rank(seconds: float) -> tuple[int, str]:
    """Long enough that each rank gets one such task; its rank, and its process's name."""
    from mpi4py.MPI import COMM_WORLD

    time.sleep(seconds)
    return COMM_WORLD.Get_rank(), Path("/proc/self/comm").read_text().strip()
