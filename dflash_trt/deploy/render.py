# SPDX-License-Identifier: Apache-2.0
"""Output of `dflash-trt serve-config`: a file for a runtime, and the command that starts it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dflash_trt import __version__
from dflash_trt.deploy.choices import Circumstances, chosen
from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.deployment_file import Method, merged
from dflash_trt.deploy.draft_methods import draft_arguments, selection, trtllm_schedule, vllm_schedule
from dflash_trt.deploy.published import target_parsers, vllm_cache_layout
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import argument, command_line, plain

ENGINE_MODE = ("python", "-m", "dflash_trt.trtllm")
"""Starts a command in whose ranks engine mode's drafter is registered (dflash_trt/trtllm)."""
STREAM_INTERVALS = {"latency": 1, "throughput": 20}
"""Steps between two chunks of an answer; NVIDIA's gpt-oss-120b files have 20 for both, which a user sees as bursts."""
POSTPROCESS_WORKERS = 4
ATTENTION_DP = {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1}
"""Settings of NVIDIA's gpt-oss-120b-throughput.yaml (examples/configs/curated @ 25f307ee)."""


def trtllm_arguments(deployment: ResolvedDeployment, method: Method) -> dict[str, Any]:
    """The arguments of `tensorrt_llm.LLM`, the model's name aside; methods differ in what drafts need."""
    arguments: dict[str, Any] = {
        "tensor_parallel_size": deployment.tensor_parallel,
        "moe_expert_parallel_size": deployment.expert_parallel,
        "enable_attention_dp": deployment.enable_attention_dp,
        "max_batch_size": deployment.max_batch_size,
        "max_num_tokens": deployment.max_num_tokens,
        "max_seq_len": deployment.max_seq_len,
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
        "num_postprocess_workers": POSTPROCESS_WORKERS,
        "cuda_graph_config": {
            "enable_padding": not _pads_into_the_pool(deployment, method),
        },
        "kv_cache_config": {
            "dtype": deployment.kv_cache_dtype,
            "free_gpu_memory_fraction": deployment.kv_cache_fraction,
            "enable_block_reuse": deployment.reuses_prefixes("trtllm", method),
        },
    }
    of_drafts: dict[str, Any] = {}
    for key, value in chosen("trtllm", circumstances(deployment, method)).items():
        outer, _, inner = key.partition(".")
        place = of_drafts if outer == "speculative_config" else arguments[outer] if inner else arguments
        place[inner or outer] = value
    if deployment.prefix_reuse and deployment.draft_attention == "TRTLLM":
        arguments["kv_cache_config"]["use_kv_cache_manager_v2"] = True  # V1 pairs no pools
    if deployment.enable_attention_dp:
        arguments["attention_dp_config"] = ATTENTION_DP
    if deployment.file.trust_remote_code:
        arguments["trust_remote_code"] = True
    if deployment.moe_backend is not None:
        arguments["moe_config"] = {"backend": deployment.moe_backend}
    if (reasoning := target_parsers(deployment.target).reasoning.get("trtllm")) is not None:
        arguments["reasoning_parser"] = reasoning
    if method == "dflash":
        sizes, K, name = deployment.draft_sizes, deployment.num_draft_tokens, deployment.name
        arguments |= draft_arguments(
            sizes, "trtllm", _trtllm_draft(deployment), K, name, gpu=None, attention=deployment.draft_attention
        )
        if not sizes.spec.is_dspark:
            arguments["speculative_config"] |= of_drafts | _sampling(deployment)
        if deployment.draft_schedule:
            schedule = trtllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
            arguments["speculative_config"]["draft_len_schedule"] = schedule
    elif method == "eagle3":
        eagle3 = deployment.eagle3_drafter()
        arguments |= selection("eagle3", "trtllm", eagle3.model, eagle3.num_draft_tokens)
        arguments["speculative_config"] |= of_drafts | _sampling(deployment)
    return merged(arguments, deployment.runtime_arguments.of("trtllm", method, deployment.name))


def _pads_into_the_pool(deployment: ResolvedDeployment, method: Method) -> bool:
    """Whether padding rows of a batch would write into other requests' pages.

    In the workers of 414ba69f and 8d62b3e5 their slot grows at each replay of a CUDA graph, and past its pages they
    write to page 0: its request drafts worse, and so does each that reuses it. Native files pad all the same, because
    batches between two graphs are slow without.
    """
    return method == "dflash" and deployment.mode == "engine" and deployment.draft_attention == "TRTLLM"


def converted_draft(draft: DraftSizes) -> str | None:
    """Directory of a published draft's copy that has a dense Qwen3 backbone, where the draft itself has none.

    TensorRT-LLM builds the layers by model_type, and those of gpt_oss have no fused self_attn.qkv_proj.
    """
    is_published = draft.checkpoint is None and draft.spec.model_type == "gpt_oss"
    return f"{draft.name.rpartition('/')[2]}-bf16" if is_published else None


def _trtllm_draft(deployment: ResolvedDeployment) -> str:
    """Draft that TensorRT-LLM loads."""
    is_whole = deployment.mode == "native" and deployment.draft == deployment.checkpoint
    return (converted_draft(deployment.draft_sizes) if is_whole else None) or place(deployment.draft)


def place(draft: str) -> str:
    """Absolute path of a directory, because the file may be read elsewhere; a repository id unchanged."""
    return str(Path(draft).absolute()) if Path(draft).is_dir() else draft


def _sampling(deployment: ResolvedDeployment) -> dict[str, Any]:
    """Settings of the one-model sampler."""
    return {"use_rejection_sampling": True} if deployment.file.use_rejection_sampling else {}


def circumstances(deployment: ResolvedDeployment, method: Method) -> Circumstances:
    """What choices depend on."""
    return Circumstances(
        method=None if method == "none" else method, reuses_prefixes=deployment.asked_prefix_reuse,
        cache_layout=vllm_cache_layout(deployment.checkpoint, deployment.tensor_parallel),
        max_batch_size=deployment.max_batch_size,
        decode_tokens=deployment.max_batch_size * (1 + deployment.num_draft_tokens),
    )  # fmt: skip


def trtllm_command(deployment: ResolvedDeployment, method: Method, host: str, port: int) -> list[str]:
    """trtllm-serve with the model, the address, the file and, because the file has no key for it, the tool parser."""
    target, host = argument(deployment.target, "target"), argument(host, "--host")
    command = ["trtllm-serve", target, "--host", host, "--port", str(port), "--config", "FILE"]
    if (tool := target_parsers(deployment.target).tool.get("trtllm")) is not None:
        command += ["--tool_parser", tool]
    return [*ENGINE_MODE, *command] if is_engine_mode(deployment, method) else command


def is_engine_mode(deployment: ResolvedDeployment, method: Method) -> bool:
    """Whether our drafter replaces TensorRT-LLM's."""
    return deployment.mode == "engine" and method == "dflash"


CACHE_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3"}
"""SGLang's names."""


def server_arguments(
    deployment: ResolvedDeployment, runtime: Runtime, method: Method, host: str, port: int
) -> dict[str, Any]:
    """Arguments of the runtime; methods differ in what drafts need."""
    is_vllm = runtime == "vllm"
    model = {"model_tag" if is_vllm else "model_path": deployment.target}
    arguments = model | {"host": host, "port": port} | (_vllm if is_vllm else _sglang)(deployment, method)
    if deployment.file.trust_remote_code:
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
        eagle3 = deployment.eagle3_drafter()
        return arguments | selection("eagle3", runtime, eagle3.model, eagle3.num_draft_tokens)
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
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
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
        "stream_interval": STREAM_INTERVALS[deployment.file.purpose],
        **chosen("sglang", circumstances(deployment, method)),
    }


def _dflash(deployment: ResolvedDeployment, runtime: Runtime) -> dict[str, Any]:
    if deployment.draft_schedule and runtime == "sglang":
        raise ConfigError(
            f"{deployment.name}: expected one draft length, which is all that SGLang takes for DFlash, found"
            " draft_schedule",
            hint="remove draft_schedule, or tune with --runtime sglang",
        )
    sizes, K, gpu = deployment.draft_sizes, deployment.num_draft_tokens, deployment.gpus.gpu
    draft = deployment.checkpoint if deployment.mode == "engine" else deployment.draft
    arguments = draft_arguments(sizes, runtime, draft, K, deployment.name, gpu=gpu)
    if deployment.draft_schedule:
        ranges = vllm_schedule(deployment.draft_schedule, deployment.max_batch_size)
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
    return arguments


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment in a runtime's own format."""

    deployment: ResolvedDeployment
    runtime: Runtime
    method: Method
    port: int
    arguments: dict[str, Any]
    """Arguments of the runtime by name."""
    environment: dict[str, str]
    """Variables that the command sets."""
    text: str
    """For stdout: YAML, or a command line."""
    start: str
    """Command that starts the server from that text."""

    @property
    def is_engine_mode(self) -> bool:
        """Whether our drafter replaces TensorRT-LLM's."""
        return self.runtime == "trtllm" and is_engine_mode(self.deployment, self.method)

    @property
    def head(self) -> str:
        """First line of the text: a comment with the settings' digest."""
        return self.text.partition("\n")[0]

    def words(self, file: str) -> list[str]:
        """The command that starts the server; trtllm-serve reads the text from `file`."""
        if self.runtime == "trtllm":
            return [file if word == "FILE" else word for word in shlex.split(self.start)]
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


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
        f"# dflash-trt {__version__}: {name} for {deployment.gpus}, {deployment.file.purpose}"
        f" (settings {deployment.digest})\n"
    )
    environment: dict[str, str] = {}
    if runtime == "trtllm":
        arguments = trtllm_arguments(deployment, method)
        text = yaml.safe_dump(arguments, sort_keys=False, default_flow_style=False, width=120)
        start = command_line(trtllm_command(deployment, method, host, port))
    else:
        more = deployment.runtime_arguments.of(runtime, method, deployment.name)
        arguments = merged(server_arguments(deployment, runtime, method, host, port), more)
        environment = chosen(runtime, circumstances(deployment, method), is_environment=True)
        text, start = command_text(runtime, arguments, environment), "sh FILE"
    return Rendered(
        deployment=deployment, runtime=runtime, method=method, port=port, arguments=arguments,
        environment=environment, text=head + text, start=start,
    )  # fmt: skip
