# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations, each with the message that it must get."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
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
    """One change of a good configuration, and what must be said about it."""

    rule: str = ""
    change: dict[str, Any] = {}
    """By dotted path."""
    words: str = ""
    key: str = ""
    """By default the only key of `change`."""
    runtime: Runtime = "trtllm"
    gpus: str = "h200x8"
    version: str | None = None
    severity: str = ERROR
    also: tuple[str, ...] = ()
    """Other rules that refuse the same change."""

    @property
    def found_at(self) -> str:
        """Where the finding is."""
        return self.key or next(iter(self.change))


CASES = {
    # Keys that are unknown, missing, of a wrong type or out of range.
    "unknown key": Case("unknown-key", {"max_batch_siz": 8}, "write max_batch_size"),
    "unknown key like no other": Case("unknown-key", {"zzz": 8}, "look it up", severity=WARNING),
    "unknown key like no other, keys of that release": Case("unknown-key", {"zzz": 8}, "look it up",
        version="1.3.0rc27"),
    "unknown nested key": Case("unknown-key", {f"{SPEC}.block_size": 10}, "DFlashDecodingConfig"),
    "key of another release": Case("unknown-key", {f"{SPEC}.context_recompute_tail": 64}, "tensorrt_llm 1.3.0rc27",
        version="1.3.0rc27"),
    "wrong type": Case("wrong-type", {"tensor_parallel_size": "eight"}, "expected an integer, found 'eight'"),
    "wrong nested type": Case("wrong-type", {"kv_cache_config.enable_block_reuse": 2},
        "expected true or false, found 2"),
    "a word for a number": Case("coerced", {"tensor_parallel_size": "8"},
        "expected 8, found '8', which the runtime reads as 8; write 8", severity=WARNING),
    "a word for a number, read before the rules": Case("parallelism", {"tensor_parallel_size": "16"}, "found 16 ranks"),
    "a number for a flag": Case("coerced", {"kv_cache_config.enable_block_reuse": 0}, "reads as false; write false",
        severity=WARNING),
    "nothing drafted": Case("out-of-range", {f"{SPEC}.max_draft_len": 0}, "more than 0"),
    "a method in capitals": Case("unknown-value", {f"{SPEC}.decoding_type": "DFLASH"}, "write DFlash"),
    "a sampling mode in capitals": Case("unknown-value", {f"{SPEC}.advanced_sampling_mode": "FULL"}, "write full"),
    "no share of the memory": Case("wrong-type", {"kv_cache_config.free_gpu_memory_fraction": None},
        "expected a number, found None"),
    "no windows": Case("out-of-range", {"kv_cache_config.max_attention_window": []}, "at least 1 of them, found none"),
    "a window without an end": Case("out-of-range", {"kv_cache_config.max_attention_window": [-1]},
        "expected more than 0, found -1", key="kv_cache_config.max_attention_window[0]"),
    "a disk cache nowhere": Case("disk-cache", {"kv_cache_config.disk_cache_size": 1024}, "a directory for 1024 bytes",
        key="kv_cache_config.disk_cache_path"),
    "unknown graphs": Case("unknown-value", {"cuda_graph_config.mode": "zzz"}, "decode"),
    "unknown weights": Case("unknown-value", {"load_format": "zzz"}, "AUTO, DUMMY"),
    "a negative length": Case("out-of-range", {"max_seq_len": -1}, "at least 0, found -1"),
    "an argument that is dropped": Case("removed-key", {"sampler_type": "TorchSampler"}, "remove it", severity=WARNING),
    "attention of a later release": Case("unknown-value", {f"{SPEC}.attention_backend": "AUTO"},
        "which came later (main @ 414ba69f", severity=WARNING),
    "a number for a mapping": Case("wrong-type", {"moe_config": 3}, "a mapping"),
    "a flag for a number": Case("coerced", {"max_batch_size": True}, "reads as 1; write the number that is meant",
        severity=WARNING),
    "wrong list item": Case("wrong-type", {f"{SPEC}.target_layer_ids": [1, "nine"]},
        "expected an integer, found 'nine'", key=f"{SPEC}.target_layer_ids[1]",
        also=("draft-facts",)),
    "out of range": Case("out-of-range", {"kv_cache_config.free_gpu_memory_fraction": 1.5},
        "expected at most 1, found 1.5"),
    "not above a bound": Case("out-of-range", {"stream_interval": 0}, "expected more than 0, found 0"),
    "unknown word": Case("unknown-value", {f"{SPEC}.attention_backend": "VANILA"}, "write VANILLA"),
    "unknown method": Case("unknown-value", {f"{SPEC}.decoding_type": "DFlsh"}, "write DFlash"),
    "a method that the schema may not know": Case("unknown-value", {f"{SPEC}.decoding_type": "Zzz"},
        "check its keys by hand", severity=WARNING),
    "no word for a method": Case("wrong-type", {f"{SPEC}.decoding_type": None}, "expected a string, found None"),
    "a number that is none of the choices": Case("unknown-value", {"log_requests_level": 7},
        "expected one of 0, 1, 2, 3, found 7; choose one of them", runtime="sglang"),
    "no number": Case("wrong-type", {"kv_cache_config.free_gpu_memory_fraction": float("nan")},
        "expected a number, found nan"),
    "a whole number with a point": Case("coerced", {"max_num_tokens": 16384.0}, "write 16384", severity=WARNING),
    "a fraction for a number": Case("wrong-type", {"max_num_tokens": 16384.5}, "an integer or null"),
    "the keys of the method": Case("unknown-key", {f"{SPEC}.max_draft_lenn": 1}, "max_draft_len"),
    "no method": Case("missing-key", {f"{SPEC}.decoding_type": REMOVED}, "missing key: expected one of"),
    "no draft": Case("missing-key", {f"{SPEC}.speculative_model": REMOVED}, "the draft checkpoint"),
    "no draft length": Case("missing-key", {f"{SPEC}.max_draft_len": REMOVED}, "K, the"),
    # TensorRT-LLM's keys that are each well and together, or with this draft or these GPUs, are not.
    "draft longer than the block": Case("draft-length", {f"{SPEC}.max_draft_len": 10},
        "expected at most 9 (block_size 10 of z-lab/gpt-oss-120b-DFlash"),
    "draft shorter than the block": Case("draft-length", {f"{SPEC}.max_draft_len": 8}, "found 8", severity=WARNING),
    "token budget": Case("token-budget", {"max_num_tokens": 639},
        "64 * 10 = 640, found 639; raise it to 640 or set max_batch_size to 63"),
    "token budget below one request": Case("token-budget", {"max_num_tokens": 9}, "found 9; raise it to 640 ["),
    "token budget, batch left to the runtime": Case("token-budget", {"max_batch_size": REMOVED}, "2048 * 10 = 20480",
        key="max_num_tokens", severity=WARNING, also=("context-arena",)),
    "no length": Case("max-seq-len", {"max_seq_len": REMOVED}, "add max_seq_len"),
    "TRTLLM attention on Hopper": Case("draft-attention", {f"{SPEC}.attention_backend": "TRTLLM"},
        "expected SM 10.0 or SM 10.3 for TRTLLM, found h200 (SM 9.0); set it to VANILLA"),
    "TRTLLM attention on a workstation GPU": Case("draft-attention", {f"{SPEC}.attention_backend": "TRTLLM"},
        "rtxpro6000 (SM 12.0)", gpus="rtxpro6000x8"),
    "FA4 attention on Blackwell": Case("draft-attention", {f"{SPEC}.attention_backend": "FA4"},
        "expected SM 9.0 for FA4, found b300 (SM 10.3)", gpus="b300x8"),
    "prefix reuse": Case("prefix-reuse", {"kv_cache_config.enable_block_reuse": True},
        "starves the drafter, found true;"),
    "prefix reuse by default": Case("prefix-reuse", {"kv_cache_config.enable_block_reuse": REMOVED},
        "found true (its default);"),
    "prefix reuse without a remedy": Case("prefix-reuse", {"kv_cache_config.enable_block_reuse": True},
        "set kv_cache_config.enable_block_reuse to false [prefix-reuse]", version="1.3.0rc27"),
    "prefix reuse from a pool that may be shared": Case("prefix-reuse",
        {"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"}, "starves",
        key="kv_cache_config.enable_block_reuse", gpus="b300x8", severity=WARNING, version="1.3.0rc27"),
    "prefix reuse from a pool that is reused, too": Case("prefix-reuse",
        {"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"},
        "whether the drafter gets the managed pool", key="kv_cache_config.enable_block_reuse", gpus="b300x8",
        severity=UNCHECKED),
    "prefix reuse by a cache manager that pairs no pools": Case("prefix-reuse",
        {"kv_cache_config.enable_block_reuse": True, "kv_cache_config.use_kv_cache_manager_v2": False,
         f"{SPEC}.attention_backend": "TRTLLM"},
        "expected true: V1 pairs no pools", key="kv_cache_config.use_kv_cache_manager_v2", gpus="b300x8"),
    "FP8 pages for a BF16 context": Case("fp8-context",
        {"kv_cache_config.dtype": "fp8", f"{SPEC}.attention_backend": "TRTLLM"},
        "an arena of its own (dflash.py @ 8d62b3e5", key="kv_cache_config.dtype", gpus="b300x8", severity=WARNING),
    "a draft looked for where the server is started": Case("draft-place",
        {f"{SPEC}.speculative_model": "engine-of-another-machine"}, "write its whole path", severity=UNCHECKED),
    "context arena": Case("context-arena",
        {"max_seq_len": 131072, "max_batch_size": 1024, "cuda_graph_config.max_batch_size": 64},
        "what is left of each h200 (140.4 GiB), found 256.3 GiB", key="max_batch_size"),
    "cache pool": Case("memory", {"kv_cache_config.free_gpu_memory_fraction": 0.001},
        "a cache pool for one request of 32768", key="max_batch_size"),
    "a pool that leaves no room behind it": Case("pool-fraction", {"kv_cache_config.free_gpu_memory_fraction": 0.97},
        "beside the pool (arena replaced and captured by graphs), found", severity=WARNING, version="1.3.0rc27"),
    "a GPU too small for anything": Case("memory",
        {"tensor_parallel_size": 1, f"{SPEC}.attention_backend": "TRTLLM", "max_num_tokens": 1000000},
        "use at least h100x2, with tensor_", key="max_batch_size", gpus="h100x1", also=("draft-attention",)),
    "a private arena that would not fit": Case("context-arena",
        {f"{SPEC}.attention_backend": "TRTLLM", "max_seq_len": 131072, "max_batch_size": 1024,
         "cuda_graph_config.max_batch_size": 64},
        "should the drafter not get the managed pool", key="max_batch_size", gpus="b300x8", severity=WARNING),
    "more ranks than GPUs": Case("parallelism", words="at most the 4 GPUs of h200x4, found 8 ranks; set it to 4",
        key="tensor_parallel_size", gpus="h200x4"),
    "experts that do not divide": Case("parallelism", {"moe_expert_parallel_size": 3},
        "a divisor of tensor_parallel_size 8, found 3"),
    "experts on one rank": Case("parallelism", {"moe_expert_parallel_size": 3, "tensor_parallel_size": 1},
        "found 3; set it to 1 [", key="moe_expert_parallel_size"),
    "experts that do not multiply up": Case("parallelism",
        {"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}, "expected 4", key="moe_tensor_parallel_size"),
    "graphs against their list": Case("cuda-graphs", {"cuda_graph_config.batch_sizes": [1, 2, 32]},
        "expected 32, the largest of batch_sizes, found 64", key="cuda_graph_config.max_batch_size"),
    "more tokens than positions": Case("context-length", {"max_seq_len": 131073},
        "expected at most 131072, the smaller max_position_embeddings of draft and target, found 131073",
        severity=WARNING),
    "graphs for batches that never run": Case("cuda-graphs", {"cuda_graph_config.max_batch_size": 128},
        "at most max_batch_size 64", severity=WARNING),
    "another tap than the draft's": Case("draft-facts", {f"{SPEC}.target_layer_ids": [2, 10, 18, 26, 34]},
        "expected [1, 9, 17, 25, 33] (as in z-lab/gpt-oss-120b-DFlash)"),
    "taps of a draft that is not here yet": Case("taps",
        {f"{SPEC}.target_layer_ids": REMOVED, f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash"},
        "expected [1, 9, 17, 25, 33]: where they are not known before the download", key=f"{SPEC}.target_layer_ids",
        severity=WARNING),
    "a mask token that is not published": Case("draft-facts", words="not published for z-lab/gpt-oss",
        key=f"{SPEC}.mask_token_id", severity=UNCHECKED),
    "published backbone": Case("backbone", {f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash"},
        "has not been seen", key="z-lab/gpt-oss-120b-DFlash/config.json: model_type",
        severity=WARNING),
    # vLLM's and SGLang's.
    "metrics that nobody reads": Case("metrics", {"return_perf_metrics": REMOVED}, "is a 404", severity=WARNING),
    "penalties that are refused": Case("penalties", {f"{SPEC}.enable_penalty": REMOVED}, "requests with penalties",
        severity=WARNING),
    "sglang: no metrics": Case("metrics", {"enable_metrics": False}, "write --enable-metrics", runtime="sglang",
        severity=WARNING),
    "vllm: prefix caching": Case("prefix-reuse", {"enable_prefix_caching": True}, "found true: tokens that a hit",
        runtime="vllm", severity=WARNING),
    "another target's modelling code": Case("modeling-v2", {"env_overrides": {"TRTLLM_MODELING_V2": "auto"}},
        "found auto", key="env_overrides.TRTLLM_MODELING_V2", severity=WARNING),
    "vllm: prefix caching by default": Case("prefix-reuse", {"enable_prefix_caching": REMOVED},
        "found on by default: tokens that a hit spares", runtime="vllm", severity=WARNING),
    "vllm: no counts": Case("metrics", {"disable_log_stats": True}, "/metrics has no counts", runtime="vllm",
        severity=WARNING),
    "vllm: graphs for half a batch": Case("cuda-graphs", {"max_cudagraph_capture_size": 320},
        "at least 640, found 320", runtime="vllm", severity=WARNING),
    "vllm: another parser": Case("parsers", {"reasoning_parser": "qwen3"}, "openai_gptoss for openai/gpt-oss-120b",
        runtime="vllm", severity=WARNING),
    "another method": Case("method", {f"{SPEC}.decoding_type": "PARD"}, "the method pard: its keys were compared",
        severity=UNCHECKED),
    "vllm: another method": Case("method", {f"{SPEC}.method": "mtp"}, "the method mtp", runtime="vllm",
        severity=UNCHECKED),
    "vllm: DSpark longer than the block": Case("draft-length",
        {f"{SPEC}.method": "dspark", f"{SPEC}.num_speculative_tokens": 12}, "expected at most 9",
        key=f"{SPEC}.num_speculative_tokens", runtime="vllm"),
    "sglang: another method": Case("method", {"speculative_algorithm": "EAGLE3"}, "the method eagle3",
        runtime="sglang", severity=UNCHECKED),
    "vllm: sliding and full layers": Case("hybrid-cache", {"disable_hybrid_kv_cache_manager": True},
        "found true: gpt-oss-120b then keeps 1.69 times the KV bytes",
        runtime="vllm", severity=WARNING),
    "vllm: more tokens than positions": Case("context-length", {"max_model_len": 131073}, "set it to 131072",
        runtime="vllm", severity=WARNING),
    "sglang: more tokens than positions": Case("context-length", {"context_length": 131073}, "set it to 131072",
        runtime="sglang", severity=WARNING),
    "vllm: unknown key": Case("unknown-key", {"max_num_seqz": 3}, "write max_num_seqs", runtime="vllm"),
    "vllm: unknown speculative key": Case("unknown-key", {f"{SPEC}.num_speculative_token": 3},
        "write num_speculative_tokens", runtime="vllm"),
    "vllm: draft longer than the block": Case("draft-length", {f"{SPEC}.num_speculative_tokens": 10},
        "expected at most 9", runtime="vllm"),
    "vllm: token budget": Case("token-budget", {"max_num_batched_tokens": 512},
        "64 * 10 = 640, found 512: vLLM runs at most 51 requests at once", runtime="vllm", severity=WARNING),
    "vllm: token budget below a token a request": Case("token-budget", {"max_num_batched_tokens": 63},
        "found 63; raise it to 640 or set max_num_seqs to 6", runtime="vllm"),
    "vllm: token budget below a draft": Case("token-budget", {"max_num_batched_tokens": 10, "max_num_seqs": 4},
        "4 * 10 = 40, found 10; raise it to 40", runtime="vllm"),
    "vllm: no draft": Case("missing-key", {f"{SPEC}.model": REMOVED}, "dflash", runtime="vllm"),
    "vllm: a draft on some ranks": Case("parallelism", {f"{SPEC}.draft_tensor_parallel_size": 2},
        "1 or tensor_parallel_size 8, found 2", runtime="vllm"),
    "vllm: a key that is only refused": Case("renamed-key", {f"{SPEC}.tensor_parallel_size": 8},
        "write draft_tensor_parallel_size", runtime="vllm"),
    "vllm: more ranks than GPUs": Case("parallelism", {"data_parallel_size": 2}, "found 16 ranks; set it to 4",
        runtime="vllm", key="tensor_parallel_size"),
    "vllm: memory": Case("memory", {"max_model_len": 131072 * 128}, "lower to max_model_len", runtime="vllm",
        key="max_num_seqs", gpus="h100x8"),
    "vllm: memory, by the reserve alone": Case("memory", {"max_model_len": 131072 * 70},
        "with 6.0 GiB kept for activations, an estimate", runtime="vllm", key="max_num_seqs", gpus="h100x8",
        severity=WARNING),
    "sglang: two windows": Case("verify-window", {"speculative_dflash_block_size": 8},
        "expected 10, as speculative_num_draft_tokens, found 8", runtime="sglang"),
    "sglang: window longer than the block": Case("draft-length", {"speculative_num_draft_tokens": 11},
        "expected at most 10 (block_size 10", runtime="sglang"),
    "sglang: a window narrower than the block": Case("verify-window", {"speculative_num_draft_tokens": 4},
        "cut the draft's own block to 4 of 10", runtime="sglang", key="speculative_dflash_block_size",
        severity=UNCHECKED),
    "sglang: no draft": Case("missing-key", {"speculative_draft_model_path": REMOVED}, "a value for DFLASH",
        runtime="sglang"),
    "sglang: pipeline": Case("parallelism", {"pp_size": 2}, "expected 1 with DFLASH", runtime="sglang"),
    "sglang: head under data parallelism": Case("dp-attention", {"attn_dp_size": 2}, "true with", runtime="sglang",
        key="enable_dp_lm_head"),
    "sglang: window smaller than the block": Case("draft-window", {"speculative_draft_window_size": 4},
        "at least the verify window 10", runtime="sglang"),
    "sglang: sinks without a window": Case("draft-window", {"speculative_draft_sink_size": 4},
        "expected speculative_draft_window_size", runtime="sglang"),
    "sglang: requests left to it": Case("running-requests", {"max_running_requests": REMOVED}, "SGLang takes 48",
        runtime="sglang", severity=WARNING),
}  # fmt: skip
