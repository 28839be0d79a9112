# SPDX-License-Identifier: Apache-2.0
"""Decodes prompts through TensorRT-LLM's LLM API with a deployment's arguments. Not yet run with TensorRT-LLM.

The decode loop is the executor's own: it spawns a rank for each GPU. Read in NVIDIA/TensorRT-LLM, 2026-10:
tensorrt_llm/sampling_params.py, executor/result.py, and evaluate/lm_eval.py for what the counters of a result mean.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.method import Method
from dflash_trt.deploy.real_classes import installed_version
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import load_schema, versions
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments
from dflash_trt.errors import ConfigError
from dflash_trt.launch_environment import is_trtllm_launch
from dflash_trt.trtllm.contract import import_tensorrt_llm
from dflash_trt.trtllm.start import check_start

NO_EFFECT = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": None, "stop": (), "ignore_eos": False,
}  # fmt: skip
"""Values of our sampling options that TensorRT-LLM gets by not being told."""
DRAWING = ("top_k", "top_p", "min_p")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's answer, and TensorRT-LLM's own counters; None where it kept none."""

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    iterations: int | None
    """Passes that the request took part in."""
    tokens_per_iteration: float | None
    accepted: int | None
    """Draft tokens that the target accepted."""
    proposed: int | None
    """Draft tokens that it verified, the placeholders of a request's first pass among them."""

    def tau(self, num_draft_tokens: int) -> float | None:
        """Accepted drafts + bonus, per pass that verified `num_draft_tokens`; None without one."""
        if not self.proposed or self.accepted is None:
            return None
        return 1 + self.accepted * num_draft_tokens / self.proposed


def generate(
    deployment: ResolvedDeployment, method: Method, prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> list[Answer]:
    """Answers to prompts of token ids, all submitted at once; `sampling` is made by `sampling_arguments`.

    Raises MissingDependencyError without TensorRT-LLM, ConfigError for a deployment that it could not run or that has
    more ranks than GPUs are here, EngineError where engine mode's ranks would not have our drafter.
    """
    package = import_tensorrt_llm("--runtime trtllm")
    arguments = trtllm_arguments(deployment, method)
    _check(deployment, arguments)
    if deployment.mode == "engine" and method == "dflash":
        check_start()
    with package.LLM(model=deployment.target, **arguments) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, sampling_params=package.SamplingParams(**sampling), use_tqdm=False)
    return [_answer(output) for output in outputs]


def sampling_arguments(max_tokens: int, **options: Any) -> dict[str, Any]:
    """Our sampling options as arguments of `tensorrt_llm.SamplingParams`, whose own defaults decode greedily."""
    said = {name: value for name, value in options.items() if value != NO_EFFECT[name]}
    if "temperature" not in said:  # greedy, whatever else is said about drawing
        said = {name: value for name, value in said.items() if name not in DRAWING}
    if "stop" in said:
        said["stop"] = list(said["stop"])
    return {"max_tokens": max_tokens, "return_perf_metrics": True, **said}


def _check(deployment: ResolvedDeployment, arguments: dict[str, Any]) -> None:
    """What `serve-config --check` would refuse, and more ranks than this machine has GPUs for."""
    installed = installed_version("trtllm")
    schema = load_schema("trtllm", installed if installed in versions("trtllm") else None)
    findings = check(deployment_config(deployment, schema, arguments))
    if errors := [finding for finding in findings if finding.severity == ERROR]:
        listed = "".join(f"\n  - {finding}" for finding in errors)
        raise ConfigError(f"{deployment.name}: expected a configuration that TensorRT-LLM can run, found:{listed}")
    ranks, gpus = deployment.tensor_parallel, import_module("torch").cuda.device_count()
    if ranks > gpus and not is_trtllm_launch(os.environ):
        raise ConfigError(
            f"{deployment.name}: expected {ranks} GPUs on this machine, found {gpus}",
            hint=f"over several nodes: mpirun -n {ranks} trtllm-llmapi-launch dflash-trt {shlex.join(sys.argv[1:])}",
        )


def _answer(output: Any) -> Answer:
    """The first sequence of a RequestOutput."""
    completion = output.outputs[0]
    metrics = getattr(completion, "request_perf_metrics", None)
    speculation: Any = None if metrics is None else metrics.speculative_decoding
    drafted = speculation is not None and speculation.total_draft_tokens > 0
    return Answer(
        token_ids=list(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        iterations=getattr(output, "decoding_iter", None),
        tokens_per_iteration=getattr(output, "avg_decoded_tokens_per_iter", None),
        accepted=speculation.total_accepted_draft_tokens if drafted else None,
        proposed=speculation.total_draft_tokens if drafted else None,
    )
