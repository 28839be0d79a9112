# SPDX-License-Identifier: Apache-2.0
"""`verify` of a deployment file: TensorRT-LLM with the drafter and without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.backend import run
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.output import number_text, print_json, print_table
from dflash_trt.errors import VerificationError
from dflash_trt.trtllm.llm_backend import deployment_tokenizer, open_deployment

if TYPE_CHECKING:
    from dflash_trt.api.chat_template import TemplateOptions
    from dflash_trt.api.prompts import PromptLine
    from dflash_trt.deploy.deployment_file import Method

METHODS: tuple[Method, ...] = ("dflash", "none")


def verify_deployment(
    config: Path, target: str | None, prompts: Sequence[PromptLine], max_tokens: int, template: TemplateOptions | None,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Decode prompts with the drafter and without; VerificationError when a token differs."""
    from dflash_trt.runtime.measure.statistics import first_difference

    tokenizer = deployment_tokenizer(config, target)
    ids = [prompt.encode(tokenizer, template) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens)
    answers, plain = (_answers(config, target, method, ids, params) for method in METHODS)
    results: list[dict[str, Any]] = [
        {
            "name": prompt.id,
            "num_prompt_tokens": len(tokens),
            "num_output_tokens": len(answer.token_ids),
            "steps": answer.steps,
            "tau": answer.tau,
            "first_difference": first_difference(plain_answer.token_ids, answer.token_ids),
        }
        for prompt, tokens, answer, plain_answer in zip(prompts, ids, answers, plain, strict=True)
    ]
    differing = [result["name"] for result in results if result["first_difference"] is not None]
    taus = [result["tau"] for result in results if result["tau"] is not None]
    tau = sum(taus) / len(taus) if taus else None
    if as_json:
        print_json("verify", {"passed": not differing, "tau": tau, "prompts": results})
    else:
        columns = ("prompt", "prompt tokens", "tokens", "steps", "tau", "first difference")
        rows = [[_shown(value) for value in result.values()] for result in results]
        print_table(f"tau {number_text(tau)}", columns, rows)
    if differing:
        raise VerificationError(
            f"expected the tokens that TensorRT-LLM emits without the drafter, found others in {len(differing)} of"
            f" {len(results)} prompts; the first is {differing[0]!r}",
            hint="compare in the embedded runtime too: TensorRT-LLM's kernels round differently for other batch shapes",
        )


def _shown(value: Any) -> str:
    if isinstance(value, msgspec.Struct):  # a difference
        return ", ".join(f"{name} {part}" for name, part in msgspec.structs.asdict(value).items())
    return number_text(value)


def _answers(
    config: Path, target: str | None, method: Method, prompts: list[list[int]], params: SamplingParams
) -> list[Completion]:
    with closing(open_deployment(config, target, method)) as backend:
        return run(backend, prompts, params)
