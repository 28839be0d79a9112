# SPDX-License-Identifier: Apache-2.0
"""Output of `dflash-trt serve-config`: a file for a runtime, and the command that starts it."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from dflash_trt import __version__
from dflash_trt.deploy.choices import chosen, chosen_environment
from dflash_trt.deploy.deployment_file import Eagle3, Method
from dflash_trt.deploy.draft_methods import draft_arguments
from dflash_trt.deploy.draft_schedule import vllm_schedule
from dflash_trt.deploy.flags import command_text
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.runtime_arguments import merged
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.trtllm_arguments import STREAM_INTERVALS, circumstances, trtllm_arguments, trtllm_command
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line, plain

CACHE_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3"}
"""SGLang's names."""


def server_arguments(
    deployment: ResolvedDeployment, runtime: Runtime, method: Method, host: str, port: int
) -> dict[str, Any]:
    """Arguments of the runtime; methods differ in what drafts need."""
    is_vllm = runtime == "vllm"
    model = {"model_tag" if is_vllm else "model_path": deployment.target}
    arguments = model | {"host": host, "port": port} | (_vllm if is_vllm else _sglang)(deployment, method)
    if deployment.trust_remote_code:
        arguments["trust_remote_code"] = True
    parsers = target_parsers(deployment.target)
    if runtime in parsers.reasoning:
        arguments["reasoning_parser"] = parsers.reasoning[runtime]
    if runtime in parsers.tool:
        arguments |= {"enable_auto_tool_choice": True} if is_vllm else {}
        arguments["tool_call_parser"] = parsers.tool[runtime]
    if method == "none":
        return arguments
    if method == "eagle3":
        return arguments | _eagle3(deployment.eagle3_drafter(), runtime)
    return arguments | _dflash(deployment, runtime)


def _vllm(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    return {
        "tensor_parallel_size": deployment.tensor_parallel,
        "enable_expert_parallel": deployment.expert_parallel > 1,
        "max_model_len": deployment.max_seq_len,
        "max_num_seqs": deployment.max_batch_size,
        "max_num_batched_tokens": deployment.max_num_tokens,
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "enable_chunked_prefill": True,
        "stream_interval": STREAM_INTERVALS[deployment.purpose],
        **chosen("vllm", circumstances(deployment, method)),
    }


def _sglang(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    return {
        "tp_size": deployment.tensor_parallel,
        "ep_size": deployment.expert_parallel,
        "context_length": deployment.max_seq_len,
        "max_running_requests": deployment.max_batch_size,
        "chunked_prefill_size": deployment.max_num_tokens,
        "kv_cache_dtype": CACHE_DTYPES[deployment.kv_cache_dtype],
        "stream_interval": STREAM_INTERVALS[deployment.purpose],
        **chosen("sglang", circumstances(deployment, method)),
    }


def _eagle3(eagle3: Eagle3, runtime: Runtime) -> dict[str, Any]:
    draft, K = eagle3.model, eagle3.num_draft_tokens
    if runtime == "vllm":
        return {"speculative_config": {"method": "eagle3", "model": draft, "num_speculative_tokens": K}}
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": K,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": K + 1,
    }


def _dflash(deployment: ResolvedDeployment, runtime: Runtime) -> dict[str, Any]:
    if deployment.draft_schedule and runtime == "sglang":
        raise ConfigError(
            f"{deployment.name}: expected one draft length, which is all that SGLang takes for DFlash, found"
            " draft_schedule",
            hint="remove draft_schedule, or tune with --runtime sglang",
        )
    sizes, K, gpu = deployment.draft_sizes, deployment.num_draft_tokens, deployment.gpus.gpu
    arguments = draft_arguments(sizes, runtime, _draft(deployment), K, deployment.name, gpu=gpu)
    if deployment.draft_schedule:
        ranges = vllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    return arguments


def _draft(deployment: ResolvedDeployment) -> str:
    return deployment.checkpoint if deployment.mode == "engine" else deployment.draft


class Rendered(msgspec.Struct, frozen=True):
    """A deployment in a runtime's own format."""

    arguments: dict[str, Any]
    """Arguments by name, for checks."""
    environment: dict[str, str]
    """Variables that the command sets."""
    text: str
    """For stdout: YAML, or a command line."""
    start: str
    """The command that starts the server from that text."""


def render(deployment: ResolvedDeployment, runtime: Runtime, method: Method, *, host: str, port: int) -> Rendered:
    """Render deterministically; methods differ in what drafts need.

    Raises ConfigError for a runtime that cannot serve the deployment.
    """
    if runtime not in deployment.runtimes:
        raise ConfigError(
            f"{deployment.name}: runtimes: expected {' or '.join(deployment.runtimes)}, found {runtime}, which cannot"
            " serve this deployment",
            hint=f"give --runtime {deployment.runtimes[0]}; the file says why",
        )
    name = plain(deployment.name, "the deployment's name")
    head = (
        f"# dflash-trt {__version__}: {name} for {deployment.gpus}, {deployment.purpose}"
        f" (settings {deployment.digest})\n"
    )
    if runtime == "trtllm":
        arguments = trtllm_arguments(deployment, method)
        text = head + yaml.safe_dump(arguments, sort_keys=False, default_flow_style=False, width=120)
        return Rendered(arguments, {}, text, command_line(trtllm_command(deployment, method, host, port)))
    more = deployment.runtime_arguments.of(runtime, method, deployment.name)
    arguments = merged(server_arguments(deployment, runtime, method, host, port), more)
    environment = chosen_environment(runtime, circumstances(deployment, method))
    return Rendered(arguments, environment, head + command_text(runtime, arguments, environment), "sh FILE")
