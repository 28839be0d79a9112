# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's LLM API as a backend. Not yet run with TensorRT-LLM.

The decode loop is the executor's own: it spawns a rank for each GPU. Read in NVIDIA/TensorRT-LLM, 2026-10:
tensorrt_llm/sampling_params.py, executor/result.py, and evaluate/lm_eval.py for what the counters of a result mean;
NVIDIA's llmapi model (triton_backend/all_models/llmapi) for streams.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.backend import Chunk, Prompt
from dflash_trt.api.chat_template import prompt_token_ids
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SAMPLER_FIELDS, SamplingParams
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import Method, check_runtime, load_deployment
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.real_classes import installed_version
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE, trtllm_arguments
from dflash_trt.errors import ConfigError, RequestError
from dflash_trt.trtllm.launch_environment import is_trtllm_launch
from dflash_trt.trtllm.registration import check_start, import_tensorrt_llm, running_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAME_NAMES = (*SAMPLER_FIELDS, "ignore_eos")
DRAWING = ("top_k", "top_p", "min_p")
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
KV_CACHE = (
    "num_reused_blocks", "num_missed_blocks", "num_new_allocated_blocks", "num_total_allocated_blocks",
    "kv_cache_hit_rate",
)  # fmt: skip


def deployment_tokenizer(config: Path, target: str | None) -> Any:
    """The tokenizer of what a deployment file serves, or of `target`.

    Raises ConfigError for a deployment of other runtimes, MissingDependencyError without TensorRT-LLM, before anything
    of the target is asked for.
    """
    file = load_deployment(config)
    check_runtime(file, config.stem, "trtllm")
    import_tensorrt_llm("a deployment file")
    return load_tokenizer(configuration_directory(target or file.target))


def open_deployment(config: Path, target: str | None, method: Method) -> TrtllmBackend:
    """Opens a deployment file, with its own target or the one called `target`; raises as `TrtllmBackend.open`."""
    return TrtllmBackend.open(resolve(load_deployment(config), config.stem, target=target), method)


class TrtllmBackend:
    """Serves requests by one LLM, whose ranks it spawns."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of tensorrt_llm.LLM; MissingDependencyError without TensorRT-LLM."""
        self._package = import_tensorrt_llm("a deployment file")
        self._target = str(arguments["model"])
        self.num_draft_tokens: int = arguments.get("speculative_config", {}).get("max_draft_len", 0)
        self._llm = self._package.LLM(**arguments)

    @classmethod
    def open(cls, deployment: ResolvedDeployment, method: Method) -> TrtllmBackend:
        """Open a deployment, with the drafter or without.

        Raises MissingDependencyError without TensorRT-LLM, ConfigError for a deployment that it could not run or that
        has more ranks than GPUs are here, EngineError where engine mode's ranks would not have our drafter.
        """
        import_tensorrt_llm("a deployment file")
        arguments = trtllm_arguments(deployment, method)
        registers = deployment.mode == "engine" and method == "dflash"
        _check(deployment, arguments, registers=registers)
        if registers:
            check_start()
        return cls({"model": deployment.target, **arguments})

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[PendingResult]:
        """Requests to submit; TensorRT-LLM checks them itself."""
        return [PendingResult(self, *asked) for asked in zip(prompts, params, strict=True)]

    def submit(self, prompt: Prompt, params: SamplingParams, *, incremental: bool) -> Any:
        """Hands a request to the executor; its RequestOutput."""
        inputs = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt_token_ids(prompt)}
        is_speculative = self.num_draft_tokens > 0
        sampling = self._package.SamplingParams(**sampling_arguments(params, is_speculative=is_speculative))
        return self._llm.generate_async(inputs, sampling, streaming=incremental)

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it grows; closing the iterator aborts the request."""
        growth = _Growth(self, prompt, params, incremental=incremental)
        try:
            async for state in growth.result:
                yield growth.chunk(state)
        finally:
            growth.end()

    def follow(self, prompt: Prompt, params: SamplingParams) -> Generator[Chunk]:
        """The answer as it grows, from the first `next` on; closing the iterator aborts the request."""
        growth = _Growth(self, prompt, params, incremental=True)
        try:
            for state in growth.result:
                yield growth.chunk(state)
        finally:
            growth.end()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return load_tokenizer(configuration_directory(self._target))

    def metrics(self) -> None:
        """None: TensorRT-LLM reports its own metrics per iteration."""
        return

    def close(self) -> None:
        """End the ranks."""
        self._llm.shutdown()

    def completion(self, result: Any, params: SamplingParams, arrived: float, seconds: float) -> Completion:
        """The first sequence of a RequestOutput, with TensorRT-LLM's own counters and times where it kept them."""
        output = result.outputs[0]
        measured = getattr(output, "request_perf_metrics", None)
        drafts = getattr(measured, "speculative_decoding", None)
        return Completion(
            token_ids=list(output.token_ids),
            text=output.text,
            finish_reason=str(output.finish_reason),
            stop_reason=getattr(output, "stop_reason", None),
            logprobs=_logprobs(output) if params.logprobs else None,
            cumulative_logprob=getattr(output, "cumulative_logprob", None) if params.logprobs else None,
            seed=params.seed,
            acceptance=None if drafts is None else self._acceptance(drafts),
            **_times(measured, arrived, seconds, len(output.token_ids)),
            other_metrics=_other_metrics(result, measured),
        )

    def _acceptance(self, drafts: Any) -> Acceptance:
        """Counters, in which placeholders of a request's first pass count as proposed: every pass has K."""
        proposed, accepted = drafts.total_draft_tokens, drafts.total_accepted_draft_tokens
        passes = round(proposed / self.num_draft_tokens) if proposed and self.num_draft_tokens else None
        return Acceptance(
            passes=passes,
            drafting_passes=passes or 0,
            emitted=None if passes is None else accepted + passes,
            proposed=proposed,
            accepted=accepted,
        )


class _Growth:
    """A submitted request, and how much of its answer is out."""

    def __init__(self, backend: TrtllmBackend, prompt: Prompt, params: SamplingParams, *, incremental: bool) -> None:
        self._backend, self._params, self._arrived = backend, params, time.perf_counter()
        self._num_characters = self._num_tokens = 0
        self.result = backend.submit(prompt, params, incremental=incremental)

    def chunk(self, state: Any) -> Chunk:
        """Text and tokens that a state of the RequestOutput has added."""
        output, seconds = state.outputs[0], time.perf_counter() - self._arrived
        whole = self._backend.completion(state, self._params, self._arrived, seconds) if state.finished else None
        text, token_ids = output.text[self._num_characters :], list(output.token_ids[self._num_tokens :])
        self._num_characters, self._num_tokens = len(output.text), len(output.token_ids)
        return Chunk(text=text, token_ids=token_ids, completion=whole)

    def end(self) -> None:
        """Abort the request unless it has ended."""
        if not self.result.finished:
            self.result.abort()


class PendingResult:
    """A request that returns its answer at once."""

    def __init__(self, backend: TrtllmBackend, prompt: Prompt, params: SamplingParams) -> None:
        self._backend, self._prompt, self._params = backend, prompt, params
        self._arrived = 0.0
        self._result: Any = None

    def submit(self) -> None:
        """Hand the request to the executor."""
        self._arrived = time.perf_counter()
        self._result = self._backend.submit(self._prompt, self._params, incremental=False)

    def result(self) -> Completion:
        """The whole answer; without TensorRT-LLM's times it ends when this returns."""
        state = self._result.result()
        return self._backend.completion(state, self._params, self._arrived, time.perf_counter() - self._arrived)

    def cancel(self) -> None:
        """Abort the request unless it has ended."""
        if self._result is not None and not self._result.finished:
            self._result.abort()


def _times(measured: Any, arrived: float, seconds: float, num_tokens: int) -> dict[str, Any]:
    timing = getattr(measured, "timing_metrics", None)
    if timing is None:
        return {
            "arrived": arrived, "queue_seconds": None, "ttft_seconds": None, "itl_seconds": None, "seconds": seconds,
        }  # fmt: skip
    came, scheduled, first, last = (getattr(timing, name).total_seconds() for name in TIMES)
    return {
        "arrived": came,
        "queue_seconds": scheduled - came,
        "ttft_seconds": first - came,
        "itl_seconds": (last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        "seconds": last - came,
    }


def _other_metrics(result: Any, measured: Any) -> dict[str, float]:
    metrics = {name: getattr(getattr(measured, "kv_cache_metrics", None), name, None) for name in KV_CACHE}
    metrics |= {name: getattr(result, name, None) for name in ("decoding_iter", "avg_decoded_tokens_per_iter")}
    return {name: value for name, value in metrics.items() if value is not None}


def _logprobs(output: Any) -> list[float] | None:
    """Log-probabilities of the sampled tokens, from numbers or from a dictionary by token id for each."""
    logprobs = getattr(output, "logprobs", None)
    if not logprobs:
        return None
    pairs = zip(output.token_ids, logprobs, strict=True)
    return [entry[token].logprob if isinstance(entry, dict) else float(entry) for token, entry in pairs]


def sampling_arguments(params: SamplingParams, *, is_speculative: bool) -> dict[str, Any]:
    """Our settings as arguments of `tensorrt_llm.SamplingParams`, whose own defaults decode greedily.

    Settings without effect are left out. RequestError for settings that TensorRT-LLM lacks, or that its one-model
    sampler refuses (speculative/spec_sampler_base.py @ 006567a).
    """
    refused = {"logprobs": bool(params.logprobs), "min_p": params.min_p > 0 and params.temperature > 0}
    if is_speculative and (found := [name for name, is_asked in refused.items() if is_asked]):
        raise RequestError(
            f"{' and '.join(found)}: expected none beside speculative decoding in TensorRT-LLM, whose sampler refuses"
            f" such requests, found {' and '.join(f'{name} {getattr(params, name)}' for name in found)}",
            hint="leave it out, or decode without drafts",
        )
    for name in ("min_tokens", "logit_bias", "top_logprobs", "prompt_logprobs", "structured_outputs"):
        if value := getattr(params, name):
            raise RequestError(f"{name}: expected none, because only the embedded runtime has it, found {value!r}")
    if params.draft_length is not None:
        raise RequestError(
            f"draft_length: expected none, because TensorRT-LLM has one for all requests, found {params.draft_length}"
        )
    default = SamplingParams()
    said = {name: getattr(params, name) for name in SAME_NAMES if getattr(params, name) != getattr(default, name)}
    if params.temperature == 0:  # greedy, whatever else is said about drawing
        said = {name: value for name, value in said.items() if name not in DRAWING}
    if params.stop_texts:
        said["stop"] = list(params.stop_texts)
    if params.stop_ids:
        said["stop_token_ids"] = sorted(params.stop_ids)
    if params.logprobs:
        said["logprobs"] = 0  # for the drawn token only
    return {"max_tokens": params.max_tokens, "return_perf_metrics": True, **said}


def _check(deployment: ResolvedDeployment, arguments: dict[str, Any], *, registers: bool) -> None:
    """Refuse what `serve-config --check` would, and more ranks than this machine has GPUs.

    `registers` says whether ranks must have our drafter.
    """
    schema = load_schema("trtllm", installed_version("trtllm"))
    findings = check(deployment_config(deployment, schema, arguments))
    if errors := [finding for finding in findings if finding.severity == ERROR]:
        listed = "".join(f"\n  - {finding}" for finding in errors)
        raise ConfigError(f"{deployment.name} cannot run in TensorRT-LLM:{listed}")
    ranks, gpus = deployment.tensor_parallel, import_module("torch").cuda.device_count()
    if ranks > gpus and not is_trtllm_launch(os.environ):
        raise ConfigError(
            f"{deployment.name}: expected {ranks} GPUs on this machine, found {gpus}",
            hint=f"over several nodes: mpirun -n {ranks} trtllm-llmapi-launch {shlex.join(_start(registers))}",
        )


def _start(registers: bool) -> list[str]:
    """Words that start this program again, with our drafter in every rank where it `registers`."""
    command = running_command()
    prefix = ENGINE_MODE if registers else ["python"] if command[0].endswith(".py") else []
    return [*prefix, *command]
