# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's keys that are each well and together, or with this draft or these GPUs, are not."""

from __future__ import annotations

from dflash_trt.deploy.finding import UNCHECKED, WARNING
from tests.deploy.broken.case import REMOVED, SPEC, Case

CASES = {
    "draft longer than the block": Case(
        rule="draft-length", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 10},
        words="expected at most 9 (block_size 10 of z-lab/gpt-oss-120b-DFlash",
    ),
    "draft shorter than the block": Case(
        rule="draft-length", key=f"{SPEC}.max_draft_len", change={f"{SPEC}.max_draft_len": 8}, words="found 8",
        severity=WARNING,
    ),
    "token budget": Case(
        rule="token-budget", key="max_num_tokens", change={"max_num_tokens": 639},
        words="64 * 10 = 640, found 639; raise it to 640 or set max_batch_size to 63",
    ),
    "token budget below one request": Case(
        rule="token-budget", key="max_num_tokens", change={"max_num_tokens": 9}, words="found 9; raise it to 640 [",
    ),
    "token budget, batch left to the runtime": Case(
        rule="token-budget", key="max_num_tokens", change={"max_batch_size": REMOVED}, words="2048 * 10 = 20480",
        severity=WARNING, also=("context-arena",),
    ),
    "no length": Case(rule="max-seq-len", key="max_seq_len", change={"max_seq_len": REMOVED}, words="add max_seq_len"),
    "TRTLLM attention on Hopper": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "TRTLLM"},
        words="expected SM 10.0 or SM 10.3 for TRTLLM, found h200 (SM 9.0); set it to VANILLA",
    ),
    "TRTLLM attention on a workstation GPU": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "TRTLLM"},
        gpus="rtxpro6000x8", words="rtxpro6000 (SM 12.0)",
    ),
    "FA4 attention on Blackwell": Case(
        rule="draft-attention", key=f"{SPEC}.attention_backend", change={f"{SPEC}.attention_backend": "FA4"},
        gpus="b300x8", words="expected SM 9.0 for FA4, found b300 (SM 10.3)",
    ),
    "prefix reuse": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse",
        change={"kv_cache_config.enable_block_reuse": True}, words="starves the drafter, found true;",
    ),
    "prefix reuse by default": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse",
        change={"kv_cache_config.enable_block_reuse": REMOVED}, words="found true (its default);",
    ),
    "prefix reuse without a remedy": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse", version="1.3.0rc27",
        change={"kv_cache_config.enable_block_reuse": True},
        words="set kv_cache_config.enable_block_reuse to false [prefix-reuse]",
    ),
    "prefix reuse from a pool that may be shared": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse", gpus="b300x8", severity=WARNING,
        change={"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"}, words="starves",
        version="1.3.0rc27",
    ),
    "prefix reuse from a pool that is reused, too": Case(
        rule="prefix-reuse", key="kv_cache_config.enable_block_reuse", gpus="b300x8", severity=UNCHECKED,
        change={"kv_cache_config.enable_block_reuse": True, f"{SPEC}.attention_backend": "TRTLLM"},
        words="whether the drafter gets the managed pool",
    ),
    "prefix reuse by a cache manager that pairs no pools": Case(
        rule="prefix-reuse", key="kv_cache_config.use_kv_cache_manager_v2", gpus="b300x8",
        change={"kv_cache_config.enable_block_reuse": True, "kv_cache_config.use_kv_cache_manager_v2": False,
                f"{SPEC}.attention_backend": "TRTLLM"},
        words="expected true: V1 pairs no pools",
    ),
    "FP8 pages for a BF16 context": Case(
        rule="fp8-context", key="kv_cache_config.dtype", gpus="b300x8", severity=WARNING,
        change={"kv_cache_config.dtype": "fp8", f"{SPEC}.attention_backend": "TRTLLM"},
        words="an arena of its own (dflash.py @ 8d62b3e5",
    ),
    "a draft looked for where the server is started": Case(
        rule="draft-place", key=f"{SPEC}.speculative_model", severity=UNCHECKED,
        change={f"{SPEC}.speculative_model": "engine-of-another-machine"}, words="write its whole path",
    ),
    "context arena": Case(
        rule="context-arena", key="max_batch_size", change={"max_seq_len": 131072, "max_batch_size": 1024,
        "cuda_graph_config.max_batch_size": 64}, words="what is left of each h200 (131.3 GiB), found 256.3 GiB",
    ),
    "cache pool": Case(
        rule="memory", key="max_batch_size",
        change={"kv_cache_config.free_gpu_memory_fraction": 0.001}, words="a cache pool for one request of 32768",
    ),
    "a pool that leaves no room behind it": Case(
        rule="pool-fraction", key="kv_cache_config.free_gpu_memory_fraction", severity=WARNING, version="1.3.0rc27",
        change={"kv_cache_config.free_gpu_memory_fraction": 0.97},
        words="beside the pool (arena replaced and captured by graphs), found",
    ),
    "a GPU too small for anything": Case(
        rule="memory", key="max_batch_size", gpus="h100x1",
        change={"tensor_parallel_size": 1, f"{SPEC}.attention_backend": "TRTLLM", "max_num_tokens": 1000000},
        words="use more or larger GPUs: no batch fits", also=("draft-attention",),
    ),
    "a private arena that would not fit": Case(
        rule="context-arena", key="max_batch_size", gpus="b300x8", severity=WARNING,
        change={f"{SPEC}.attention_backend": "TRTLLM", "max_seq_len": 131072, "max_batch_size": 1024,
                "cuda_graph_config.max_batch_size": 64},
        words="should the drafter not get the managed pool",
    ),
    "more ranks than GPUs": Case(
        rule="parallelism", key="tensor_parallel_size", gpus="h200x4", change={},
        words="at most the 4 GPUs of h200x4, found 8 ranks; set it to 4",
    ),
    "experts that do not divide": Case(
        rule="parallelism", key="moe_expert_parallel_size", change={"moe_expert_parallel_size": 3},
        words="a divisor of tensor_parallel_size 8, found 3",
    ),
    "experts on one rank": Case(
        rule="parallelism", key="moe_expert_parallel_size",
        change={"moe_expert_parallel_size": 3, "tensor_parallel_size": 1}, words="found 3; set it to 1 [",
    ),
    "experts that do not multiply up": Case(
        rule="parallelism", key="moe_tensor_parallel_size",
        change={"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}, words="expected 4",
    ),
    "graphs against their list": Case(
        rule="cuda-graphs", key="cuda_graph_config.max_batch_size",
        change={"cuda_graph_config.batch_sizes": [1, 2, 32]}, words="expected 32, the largest of batch_sizes, found 64",
    ),
    "more tokens than positions": Case(
        rule="context-length", key="max_seq_len", change={"max_seq_len": 131073}, severity=WARNING,
        words="expected at most 131072, the smaller max_position_embeddings of draft and target, found 131073",
    ),
    "graphs for batches that never run": Case(
        rule="cuda-graphs", key="cuda_graph_config.max_batch_size",
        change={"cuda_graph_config.max_batch_size": 128}, words="at most max_batch_size 64", severity=WARNING,
    ),
    "another tap than the draft's": Case(
        rule="draft-facts", key=f"{SPEC}.target_layer_ids", change={f"{SPEC}.target_layer_ids": [2, 10, 18, 26, 34]},
        words="expected [1, 9, 17, 25, 33] (as in z-lab/gpt-oss-120b-DFlash)",
    ),
    "taps of a draft that is not here yet": Case(
        rule="taps", key=f"{SPEC}.target_layer_ids", severity=WARNING,
        change={
            f"{SPEC}.target_layer_ids": REMOVED,
            f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash",
        },
        words="expected [1, 9, 17, 25, 33]: where they are not known before the download",
    ),
    "a mask token that is not published": Case(
        rule="draft-facts", key=f"{SPEC}.mask_token_id", severity=UNCHECKED, words="not published for z-lab/gpt-oss",
    ),
    "published backbone": Case(
        rule="backbone", key="z-lab/gpt-oss-120b-DFlash/config.json: model_type", words="has not been seen",
        severity=WARNING, change={f"{SPEC}.speculative_model": "z-lab/gpt-oss-120b-DFlash"},
    ),
}  # fmt: skip
