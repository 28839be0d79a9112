# SPDX-License-Identifier: Apache-2.0
"""Keys that are unknown, missing, of a wrong type or out of range."""

from __future__ import annotations

from dflash_trt.deploy.finding import WARNING
from tests.deploy.broken.case import REMOVED, SPEC, Case

CASES = {
    "unknown key": Case(
        rule="unknown-key", key="max_batch_siz", change={"max_batch_siz": 8}, words="write max_batch_size"
    ),
    "unknown key like no other": Case(
        rule="unknown-key", key="zzz", change={"zzz": 8}, words="remove it", severity=WARNING
    ),
    "unknown key like no other, keys of that release": Case(
        rule="unknown-key", key="zzz", change={"zzz": 8}, words="remove it", version="1.3.0rc27"
    ),
    "unknown nested key": Case(
        rule="unknown-key", key=f"{SPEC}.block_size", change={f"{SPEC}.block_size": 10}, words="DFlashDecodingConfig"
    ),
    "key of another release": Case(
        rule="unknown-key", key=f"{SPEC}.context_recompute_tail", change={f"{SPEC}.context_recompute_tail": 64},
        words="tensorrt_llm 1.3.0rc27", version="1.3.0rc27",
    ),
    "wrong type": Case(
        rule="wrong-type", key="tensor_parallel_size", change={"tensor_parallel_size": "eight"},
        words="expected an integer, found 'eight'",
    ),
    "wrong nested type": Case(
        rule="wrong-type", key="kv_cache_config.enable_block_reuse", change={"kv_cache_config.enable_block_reuse": 2},
        words="expected true or false, found 2",
    ),
    "a word for a number": Case(
        rule="coerced", key="tensor_parallel_size", change={"tensor_parallel_size": "8"}, severity=WARNING,
        words="expected 8, found '8', which the runtime reads as 8; write 8",
    ),
    "a word for a number, read before the rules": Case(
        rule="parallelism", key="tensor_parallel_size", change={"tensor_parallel_size": "16"}, words="found 16 ranks",
    ),
    "a number for a flag": Case(
        rule="coerced", key="kv_cache_config.enable_block_reuse", severity=WARNING,
        change={"kv_cache_config.enable_block_reuse": 0}, words="reads as false; write false",
    ),
    "nothing drafted": Case(
        rule="out-of-range", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 0}, words="more than 0",
    ),
    "a method in capitals": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "DFLASH"},
        words="write DFlash",
    ),
    "a sampling mode in capitals": Case(
        rule="unknown-value", key=f"{SPEC}.advanced_sampling_mode", change={f"{SPEC}.advanced_sampling_mode": "FULL"},
        words="write full",
    ),
    "no share of the memory": Case(
        rule="wrong-type", key="kv_cache_config.free_gpu_memory_fraction", words="expected a number, found None",
        change={"kv_cache_config.free_gpu_memory_fraction": None},
    ),
    "no windows": Case(
        rule="out-of-range", key="kv_cache_config.max_attention_window", words="at least 1 of them, found none",
        change={"kv_cache_config.max_attention_window": []},
    ),
    "a window without an end": Case(
        rule="out-of-range", key="kv_cache_config.max_attention_window[0]", words="expected more than 0, found -1",
        change={"kv_cache_config.max_attention_window": [-1]},
    ),
    "a disk cache nowhere": Case(
        rule="disk-cache", key="kv_cache_config.disk_cache_path", change={"kv_cache_config.disk_cache_size": 1024},
        words="a directory for 1024 bytes",
    ),
    "unknown graphs": Case(
        rule="unknown-value", key="cuda_graph_config.mode", change={"cuda_graph_config.mode": "zzz"}, words="decode",
    ),
    "unknown weights": Case(
        rule="unknown-value", key="load_format", change={"load_format": "zzz"}, words="AUTO, DUMMY",
    ),
    "a negative length": Case(
        rule="out-of-range", key="max_seq_len", change={"max_seq_len": -1}, words="at least 0, found -1",
    ),
    "an argument that is dropped": Case(
        rule="removed-key", key="sampler_type", change={"sampler_type": "TorchSampler"}, severity=WARNING,
        words="remove it",
    ),
    "attention of a later release": Case(
        rule="unknown-value", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "AUTO"},
        words="which came later (main @ 414ba69f", severity=WARNING,
    ),
    "a number for a mapping": Case(rule="wrong-type", key="moe_config", change={"moe_config": 3}, words="a mapping"),
    "a flag for a number": Case(
        rule="coerced", key="max_batch_size", change={"max_batch_size": True}, words="reads as 1; write 1",
        severity=WARNING,
    ),
    "wrong list item": Case(
        rule="wrong-type", key=f"{SPEC}.target_layer_ids[1]", change={f"{SPEC}.target_layer_ids": [1, "nine"]},
        words="expected an integer, found 'nine'", also=("draft-facts",),
    ),
    "out of range": Case(
        rule="out-of-range", key="kv_cache_config.free_gpu_memory_fraction",
        change={"kv_cache_config.free_gpu_memory_fraction": 1.5}, words="expected at most 1, found 1.5",
    ),
    "not above a bound": Case(
        rule="out-of-range", key="stream_interval", change={"stream_interval": 0}, words="expected more than 0, found 0"
    ),
    "unknown word": Case(
        rule="unknown-value", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "VANILA"},
        words="write VANILLA",
    ),
    "unknown method": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "DFlsh"},
        words="write DFlash",
    ),
    "a method that the schema may not know": Case(
        rule="unknown-value", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": "Zzz"},
        words="check its keys by hand", severity=WARNING,
    ),
    "no word for a method": Case(
        rule="wrong-type", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": None},
        words="expected a string, found None",
    ),
    "a number that is none of the choices": Case(
        runtime="sglang", rule="unknown-value", key="log_requests_level", change={"log_requests_level": 7},
        words="expected one of 0, 1, 2, 3, found 7; choose one of them",
    ),
    "no number": Case(
        rule="wrong-type", key="kv_cache_config.free_gpu_memory_fraction", words="expected a number, found nan",
        change={"kv_cache_config.free_gpu_memory_fraction": float("nan")},
    ),
    "a whole number with a point": Case(
        rule="coerced", key="max_num_tokens", change={"max_num_tokens": 16384.0}, words="write 16384", severity=WARNING,
    ),
    "a fraction for a number": Case(
        rule="wrong-type", key="max_num_tokens", change={"max_num_tokens": 16384.5}, words="an integer or null",
    ),
    "the keys of the method": Case(
        rule="unknown-key", key=f"{SPEC}.max_draft_lenn", change={f"{SPEC}.max_draft_lenn": 1}, words="max_draft_len",
    ),
    "no method": Case(
        rule="missing-key", key=f"{SPEC}.decoding_type", change={f"{SPEC}.decoding_type": REMOVED},
        words="missing key: expected one of",
    ),
    "no draft": Case(
        rule="missing-key", key=f"{SPEC}.speculative_model", change={f"{SPEC}.speculative_model": REMOVED},
        words="the draft checkpoint",
    ),
    "no draft length": Case(
        rule="missing-key", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": REMOVED}, words="K, the"
    ),
}  # fmt: skip
