# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package tensorrt_llm at the one seam that needs GPUs: LLM and SamplingParams.

It refuses every argument that the release's schema does not describe, and answers from a script. Fields of results
after NVIDIA/TensorRT-LLM, executor/result.py and evaluate/lm_eval.py, 2026-10; of SamplingParams, sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.schema_check import check_schema

SAMPLING_FIELDS = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "return_perf_metrics",
}  # fmt: skip
Answers = Callable[[str, list[int]], list[int]]


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
                self._kind = arguments.get("speculative_config", {}).get("decoding_type", "none")

            def __enter__(self) -> LLM:
                package.events.append(f"open {self._kind}")
                return self

            def __exit__(self, *_: object) -> None:
                package.events.append(f"close {self._kind}")

            def generate(
                self, inputs: Sequence[dict[str, list[int]]], sampling_params: SamplingParams, use_tqdm: bool = True
            ) -> list[SimpleNamespace]:
                assert not use_tqdm
                most = sampling_params.fields["max_tokens"]
                metrics = sampling_params.fields["return_perf_metrics"]
                return [
                    self._output(answers(self._kind, prompt["prompt_token_ids"])[:most], metrics) for prompt in inputs
                ]

            def _output(self, ids: list[int], metrics: bool) -> SimpleNamespace:
                speculation = None
                if self._kind == "DFlash" and metrics:
                    speculation = SimpleNamespace(total_accepted_draft_tokens=6, total_draft_tokens=27)
                elif metrics:
                    speculation = SimpleNamespace(total_accepted_draft_tokens=0, total_draft_tokens=0)
                completion = SimpleNamespace(
                    token_ids=ids,
                    text=f"<{len(ids)} tokens>",
                    finish_reason="length",
                    request_perf_metrics=SimpleNamespace(speculative_decoding=speculation) if speculation else None,
                )
                return SimpleNamespace(outputs=[completion], decoding_iter=4, avg_decoded_tokens_per_iter=len(ids) / 4)

        self.LLM = LLM
        self.SamplingParams = SamplingParams
