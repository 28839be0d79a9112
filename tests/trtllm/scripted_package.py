# SPDX-License-Identifier: Apache-2.0
"""A stand-in for tensorrt_llm at the one seam that needs GPUs: its LLM refuses unknown arguments and answers by script.

Fields of results after NVIDIA/TensorRT-LLM, executor/result.py and evaluate/lm_eval.py, 2026-10; of SamplingParams,
sampling_params.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.schema_check import check_schema

SAMPLING_FIELDS = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "return_perf_metrics", "logprobs",
}  # fmt: skip
Answers = Callable[[str, list[int]], list[int]]


class Result:
    """A RequestOutput: itself at every state of its growth."""

    def __init__(self, states: list[SimpleNamespace]) -> None:
        self._states = states
        self.finished = False
        self.aborted = False

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for state in self._states:
            self.finished = state.finished
            yield state

    async def __aiter__(self) -> AsyncIterator[SimpleNamespace]:
        for state in self._states:
            self.finished = state.finished
            yield state

    def result(self, timeout: float | None = None) -> SimpleNamespace:
        self.finished = True
        return self._states[-1]

    def abort(self) -> None:
        self.aborted = True


class Package:
    """Put into sys.modules under the name tensorrt_llm."""

    def __init__(self, answers: Answers, version: str | None = None) -> None:
        """`answers` gives the tokens for a decoding type ("DFlash" or "none") and a prompt."""
        self.made: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.events: list[str] = []
        schema, package = load_schema("trtllm", version), self

        class SamplingParams:
            def __init__(self, **fields: Any) -> None:
                if unknown := fields.keys() - SAMPLING_FIELDS:
                    raise TypeError(f"SamplingParams: unexpected {sorted(unknown)}")
                package.asked.append(fields)
                self.fields = fields

        class LLM:
            def __init__(self, model: str, **arguments: Any) -> None:
                if findings := list(check_schema(schema, arguments)):
                    raise TypeError(f"LLM: {findings[0]}")
                package.made.append({"model": model, **arguments})
                speculation = arguments.get("speculative_config", {})
                self._kind = speculation.get("decoding_type", "none")
                self._num_draft_tokens = speculation.get("max_draft_len", 0)
                package.events.append(f"open {self._kind}")

            def shutdown(self) -> None:
                package.events.append(f"close {self._kind}")

            def generate_async(
                self, inputs: str | dict[str, list[int]], sampling_params: SamplingParams, streaming: bool = False
            ) -> Result:
                ids = inputs["prompt_token_ids"] if isinstance(inputs, dict) else list(inputs.encode())
                most = sampling_params.fields["max_tokens"]
                metrics = sampling_params.fields["return_perf_metrics"]
                ids = answers(self._kind, ids)[:most]
                ends = range(1, len(ids) + 1) if streaming else [len(ids)]
                return Result([self._output(ids[:end], metrics, end == len(ids)) for end in ends])

            def _output(self, ids: list[int], metrics: bool, finished: bool) -> SimpleNamespace:
                speculation = None
                if self._kind == "DFlash" and metrics:
                    speculation = SimpleNamespace(
                        total_accepted_draft_tokens=6, total_draft_tokens=3 * self._num_draft_tokens
                    )
                elif metrics:
                    speculation = SimpleNamespace(total_accepted_draft_tokens=0, total_draft_tokens=0)
                completion = SimpleNamespace(
                    token_ids=ids, text="".join(f"<{token}>" for token in ids), finish_reason="length",
                    request_perf_metrics=SimpleNamespace(speculative_decoding=speculation) if speculation else None,
                )  # fmt: skip
                return SimpleNamespace(
                    outputs=[completion], decoding_iter=4, avg_decoded_tokens_per_iter=len(ids) / 4, finished=finished
                )

        self.LLM = LLM
        self.SamplingParams = SamplingParams
