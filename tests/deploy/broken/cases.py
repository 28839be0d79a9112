# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations; tests/golden/findings.txt has what each must get."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.deploy.deployments import rendered


def changed(runtime: Runtime, change: dict[str, Any]) -> dict[str, Any]:
    """A good configuration with some keys set or removed."""
    document = copy.deepcopy(rendered("gpt-oss-120b.h200x8.latency", runtime).arguments)
    for path, value in change.items():
        *outer, last = path.split(".")
        place = document
        for key in outer:
            place = place[key]
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    return document


def checked(tmp_path: Path, document: dict[str, Any], case: Case, draft: str | None = None) -> list[Finding]:
    """Findings of a check of that configuration as a file: for vLLM and SGLang, a command line."""
    schema = load_schema(case.runtime, case.version)
    file = tmp_path / "config"
    is_trtllm = case.runtime == "trtllm"
    file.write_text(yaml.safe_dump(document) if is_trtllm else command_text(case.runtime, document))
    gpus = parse_gpus(case.gpus, "--gpus")
    return check(file_configs(file, schema, gpus=gpus, target="openai/gpt-oss-120b", draft=draft)[0])


REMOVED = object()
SPEC = "speculative_config"


class Case(msgspec.Struct, frozen=True):
    """One change of a good configuration, by dotted path; tests/golden/findings.txt has what must be said about it."""

    change: dict[str, Any] = {}
    runtime: Runtime = "trtllm"
    gpus: str = "h200x8"
    version: str | None = None


CASES = {
    "trtllm: the good configuration": Case(),
    "vllm: the good configuration": Case(runtime="vllm"),
    "sglang: the good configuration": Case(runtime="sglang"),
    # Keys that are unknown, missing, of a wrong type or out of range.
    "unknown key": Case({"max_batch_siz": 8}),
    "unknown key like no other": Case({"zzz": 8}),
    "unknown key like no other, keys of that release": Case({"zzz": 8}, version="1.3.0rc27"),
    "unknown nested key": Case({f"{SPEC}.block_size": 10}),
    "key of another release": Case({f"{SPEC}.context_recompute_tail": 64}, version="1.3.0rc27"),
    "wrong type": Case({"tensor_parallel_size": "eight"}),
    "wrong nested type": Case({"kv_cache_config.enable_block_reuse": 2}),
    "a word for a number": Case({"tensor_parallel_size": "8"}),
    "a word for a number, read before the rules": Case({"tensor_parallel_size": "16"}),
    "a number for a flag": Case({"kv_cache_config.enable_block_reuse": 0}),
    "nothing drafted": Case({f"{SPEC}.max_draft_len": 0}),
    "a method in capitals": Case({f"{SPEC}.decoding_type": "DFLASH"}),
    "a sampling mode in capitals": Case({f"{SPEC}.advanced_sampling_mode": "FULL"}),
    "no share of the memory": Case({"kv_cache_config.free_gpu_memory_fraction": None}),
    "no windows": Case({"kv_cache_config.max_attention_window": []}),
    "a window without an end": Case({"kv_cache_config.max_attention_window": [-1]}),
    "a disk cache nowhere": Case({"kv_cache_config.disk_cache_size": 1024}),
    "unknown graphs": Case({"cuda_graph_config.mode": "zzz"}),
    "unknown weights": Case({"load_format": "zzz"}),
    "a negative length": Case({"max_seq_len": -1}),
    "an argument that is dropped": Case({"sampler_type": "TorchSampler"}),
    "attention of a later release": Case({f"{SPEC}.attention_backend": "AUTO"}),
    "a number for a mapping": Case({"moe_config": 3}),
    "a flag for a number": Case({"max_batch_size": True}),
    "wrong list item": Case({f"{SPEC}.target_layer_ids": [1, "nine"]}),
    "out of range": Case({"kv_cache_config.free_gpu_memory_fraction": 1.5}),
    "not above a bound": Case({"stream_interval": 0}),
    "unknown word": Case({f"{SPEC}.attention_backend": "VANILA"}),
    "unknown method": Case({f"{SPEC}.decoding_type": "DFlsh"}),
    "a method that the schema may not know": Case({f"{SPEC}.decoding_type": "Zzz"}),
    "no word for a method": Case({f"{SPEC}.decoding_type": None}),
    "a number that is none of the choices": Case({"log_requests_level": 7}, runtime="sglang"),
    "no number": Case({"kv_cache_config.free_gpu_memory_fraction": float("nan")}),
    "a whole number with a point": Case({"max_num_tokens": 16384.0}),
    "a fraction for a number": Case({"max_num_tokens": 16384.5}),
    "the keys of the method": Case({f"{SPEC}.max_draft_lenn": 1}),
    "no method": Case({f"{SPEC}.decoding_type": REMOVED}),
    "no draft": Case({f"{SPEC}.speculative_model": REMOVED}),
    "no draft length": Case({f"{SPEC}.max_draft_len": REMOVED}),
    # TensorRT-LLM's keys that are each well and together, or with this draft or these GPUs, are not.
    "draft longer than the block": Case({f"{SPEC}.max_draft_len": 10}),
    "draft shorter than the block": Case({f"{SPEC}.max_draft_len": 8}),
    "token budget": Case({"max_num_tokens": 639}),
    "token budget below one request": Case({"max_num_tokens": 9}),
    "token budget, batch left to the runtime": Case({"max_batch_size": REMOVED}),
    "no length": Case({"max_seq_len": REMOVED}),
    "TRTLLM attention on Hopper": Case({f"{SPEC}.attention_backend": "TRTLLM"}),
    "TRTLLM attention on a workstation GPU": Case({f"{SPEC}.attention_backend": "TRTLLM"}, gpus="rtxpro6000x8"),
    "FA4 attention on Blackwell": Case({f"{SPEC}.attention_backend": "FA4"}, gpus="b300x8"),
    "prefix reuse": Case({"kv_cache_config.enable_block_reuse": True}),
    "prefix reuse by default": Case({"kv_cache_config.enable_block_reuse": REMOVED}),
    "prefix reuse without a remedy": Case({"kv_cache_config.enable_block_reuse": True}, version="1.3.0rc27"),
    "prefix reuse from a pool that may be shared": Case(
        {"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"},
        gpus="b300x8", version="1.3.0rc27"),
    "prefix reuse from a pool that is reused, too": Case(
        {"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"}, gpus="b300x8"),
    "prefix reuse by a cache manager that pairs no pools": Case(
        {"kv_cache_config.enable_block_reuse": True, "kv_cache_config.use_kv_cache_manager_v2": False,
         f"{SPEC}.attention_backend": "TRTLLM"}, gpus="b300x8"),
    "FP8 pages for a BF16 context": Case(
        {"kv_cache_config.dtype": "fp8", f"{SPEC}.attention_backend": "TRTLLM"}, gpus="b300x8"),
    "a draft looked for where the server is started": Case({f"{SPEC}.speculative_model": "engine-of-another-machine"}),
    "context arena": Case({"max_seq_len": 131072, "max_batch_size": 1024, "cuda_graph_config.max_batch_size": 64}),
    "cache pool": Case({"kv_cache_config.free_gpu_memory_fraction": 0.001}),
    "a pool that leaves no room behind it": Case(
        {"kv_cache_config.free_gpu_memory_fraction": 0.97}, version="1.3.0rc27"),
    "a GPU too small for anything": Case(
        {"tensor_parallel_size": 1, f"{SPEC}.attention_backend": "TRTLLM", "max_num_tokens": 1000000}, gpus="h100x1"),
    "a private arena that would not fit": Case(
        {f"{SPEC}.attention_backend": "TRTLLM", "max_seq_len": 131072, "max_batch_size": 1024,
         "cuda_graph_config.max_batch_size": 64}, gpus="b300x8"),
    "more ranks than GPUs": Case(gpus="h200x4"),
    "experts that do not divide": Case({"moe_expert_parallel_size": 3}),
    "experts on one rank": Case({"moe_expert_parallel_size": 3, "tensor_parallel_size": 1}),
    "experts that do not multiply up": Case({"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}),
    "graphs against their list": Case({"cuda_graph_config.batch_sizes": [1, 2, 32]}),
    "more tokens than positions": Case({"max_seq_len": 131073}),
    "graphs for batches that never run": Case({"cuda_graph_config.max_batch_size": 128}),
    "another tap than the draft's": Case({f"{SPEC}.target_layer_ids": [2, 10, 18, 26, 34]}),
    "taps of a draft that is not here yet": Case(
        {f"{SPEC}.target_layer_ids": REMOVED, f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash"}),
    "published backbone": Case({f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash"}),
    # vLLM's and SGLang's.
    "metrics that nobody reads": Case({"return_perf_metrics": REMOVED}),
    "penalties that are refused": Case({f"{SPEC}.enable_penalty": REMOVED}),
    "sglang: no metrics": Case({"enable_metrics": False}, runtime="sglang"),
    "vllm: prefix caching": Case({"enable_prefix_caching": True}, runtime="vllm"),
    "another target's modelling code": Case({"env_overrides": {"TRTLLM_MODELING_V2": "auto"}}),
    "vllm: prefix caching by default": Case({"enable_prefix_caching": REMOVED}, runtime="vllm"),
    "vllm: no counts": Case({"disable_log_stats": True}, runtime="vllm"),
    "vllm: graphs for half a batch": Case({"max_cudagraph_capture_size": 320}, runtime="vllm"),
    "vllm: another parser": Case({"reasoning_parser": "qwen3"}, runtime="vllm"),
    "another method": Case({f"{SPEC}.decoding_type": "PARD"}),
    "vllm: another method": Case({f"{SPEC}.method": "mtp"}, runtime="vllm"),
    "vllm: DSpark longer than the block": Case(
        {f"{SPEC}.method": "dspark", f"{SPEC}.num_speculative_tokens": 12}, runtime="vllm"),
    "sglang: another method": Case({"speculative_algorithm": "EAGLE3"}, runtime="sglang"),
    "vllm: sliding and full layers": Case({"disable_hybrid_kv_cache_manager": True}, runtime="vllm"),
    "vllm: more tokens than positions": Case({"max_model_len": 131073}, runtime="vllm"),
    "sglang: more tokens than positions": Case({"context_length": 131073}, runtime="sglang"),
    "vllm: unknown key": Case({"max_num_seqz": 3}, runtime="vllm"),
    "vllm: unknown speculative key": Case({f"{SPEC}.num_speculative_token": 3}, runtime="vllm"),
    "vllm: draft longer than the block": Case({f"{SPEC}.num_speculative_tokens": 10}, runtime="vllm"),
    "vllm: token budget": Case({"max_num_batched_tokens": 512}, runtime="vllm"),
    "vllm: token budget below a token a request": Case({"max_num_batched_tokens": 63}, runtime="vllm"),
    "vllm: token budget below a draft": Case({"max_num_batched_tokens": 10, "max_num_seqs": 4}, runtime="vllm"),
    "vllm: no draft": Case({f"{SPEC}.model": REMOVED}, runtime="vllm"),
    "vllm: a draft on some ranks": Case({f"{SPEC}.draft_tensor_parallel_size": 2}, runtime="vllm"),
    "vllm: a key that is only refused": Case({f"{SPEC}.tensor_parallel_size": 8}, runtime="vllm"),
    "vllm: more ranks than GPUs": Case({"data_parallel_size": 2}, runtime="vllm"),
    "vllm: memory": Case({"max_model_len": 131072 * 128}, runtime="vllm", gpus="h100x8"),
    "vllm: memory, by the reserve alone": Case({"max_model_len": 131072 * 70}, runtime="vllm", gpus="h100x8"),
    "sglang: two windows": Case({"speculative_dflash_block_size": 8}, runtime="sglang"),
    "sglang: window longer than the block": Case({"speculative_num_draft_tokens": 11}, runtime="sglang"),
    "sglang: a window narrower than the block": Case({"speculative_num_draft_tokens": 4}, runtime="sglang"),
    "sglang: no draft": Case({"speculative_draft_model_path": REMOVED}, runtime="sglang"),
    "sglang: pipeline": Case({"pp_size": 2}, runtime="sglang"),
    "sglang: head under data parallelism": Case({"attn_dp_size": 2}, runtime="sglang"),
    "sglang: window smaller than the block": Case({"speculative_draft_window_size": 4}, runtime="sglang"),
    "sglang: sinks without a window": Case({"speculative_draft_sink_size": 4}, runtime="sglang"),
    "sglang: requests left to it": Case({"max_running_requests": REMOVED}, runtime="sglang"),
}  # fmt: skip
