# SPDX-License-Identifier: Apache-2.0
"""Whether weights, drafter, context arena and a useful cache pool fit the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.deployment_file import DEFAULT_SHARE
from dflash_trt.deploy.finding import ERROR, WARNING, Finding
from dflash_trt.deploy.memory import (
    ACTIVATION_RESERVE_BYTES,
    MAX_BATCH,
    POOL_FRACTION,
    GpuMemory,
    gpu_memory,
    is_dense,
    paged_arena_bytes,
    pool_fraction,
    smallest_gpus,
)
from dflash_trt.deploy.resolved_deployment import ServedModels, ServingLoad
from dflash_trt.deploy.rules.checked_config import CheckedConfig, unchecked, warning
from dflash_trt.deploy.schema import Runtime, RuntimeKeys, Schema

NUMBERS = ("ranks", "max_batch_size", "max_num_tokens", "max_seq_len", "num_draft_tokens")
"""Settings that a load is made of, by their common names."""
SHARES: dict[Runtime, str] = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
"""Arguments for the share of the whole GPU's memory that weights and cache take together."""


def document_load(config: CheckedConfig) -> ServingLoad | None:
    """Load of the arguments on each GPU; None where the draft, the GPU or a number is not known."""
    keys = config.keys
    settings = {name: config.number(getattr(keys, name)) for name in NUMBERS}
    numbers = {name: number for name, number in settings.items() if number is not None}
    served = config.served
    if served.draft_sizes is None or served.gpus is None or len(numbers) < len(NUMBERS):
        return None  # `_missing` lists them
    numbers["num_draft_tokens"] -= keys.counts_window
    numbers["tensor_parallel"] = numbers.pop("ranks")
    attention_dp = config.setting("enable_attention_dp") is True
    native_ranks = 1 if attention_dp else numbers["tensor_parallel"]
    fraction = config.setting("kv_cache_config.free_gpu_memory_fraction")
    is_share = config.runtime == "trtllm" and isinstance(fraction, (int, float)) and 0 <= fraction <= 1
    known = {name: getattr(served, name) for name in ServedModels.__struct_fields__}
    return ServingLoad(
        **known | numbers | {"num_ranks": served.num_ranks if served.mode == "engine" else native_ranks},
        enable_attention_dp=attention_dp,
        draft_attention=str(config.setting("speculative_config.attention_backend")),
        kv_cache_dtype="fp8" if "fp8" in str(config.setting(keys.cache_dtype)) else "auto",
        kv_cache_fraction=fraction if is_share else POOL_FRACTION,
    )


def pool_share(config: CheckedConfig) -> Iterator[Finding]:
    """A deployment's share of the cache pool, which TensorRT-LLM alone is given."""
    served, key = config.served, SHARES.get(config.runtime)
    if key is None or not isinstance(served, ServingLoad) or config.is_set(key):
        return
    if (share := served.kv_cache_fraction) != DEFAULT_SHARE:
        yield warning(
            "pool-share", key, "a share of the GPU's memory",
            f"none: kv_cache_fraction {share} is of what the weights leave, as TensorRT-LLM has it, and is not written",
            f"--set {key}=SHARE, or runtime_arguments",
        )  # fmt: skip


def check_memory(config: CheckedConfig) -> Iterator[Finding]:
    """Refuse what cannot fit, and name the largest sizes that do; warn where a smaller reserve would let it fit."""
    keys = config.keys
    load = document_load(config)
    if load is None:
        missing, fixes = _missing(config)
        yield unchecked("memory", keys.max_batch_size, f"unknown: {', '.join(missing)}", f"give {' and '.join(fixes)}")
        return
    memory = gpu_memory(load, config.schema)
    for what in memory.unknown:
        yield unchecked("memory", what.partition(": ")[0], what.partition(": ")[2], "give --target DIR")
    if memory.fits:
        yield from _private_arena(config, load, memory)
        yield from _beside_the_pool(config, load, memory)
        return
    rule = "context-arena" if memory.free_bytes < 0 and _arena(memory) else "memory"
    # TensorRT-LLM itself sets aside as much for activations as is counted; of the others it is an estimate.
    is_estimate = memory.is_estimate and config.runtime != "trtllm"
    problem, fix = _refusal(load, memory, config.schema)
    if is_estimate:
        problem += f", with {_gib(ACTIVATION_RESERVE_BYTES)} kept for activations, an estimate"
    yield Finding(rule, WARNING if is_estimate else ERROR, keys.max_batch_size, problem, fix)


def _missing(config: CheckedConfig) -> tuple[list[str], list[str]]:
    """Facts and settings that memory depends on and that are missing, and how to give them."""
    keys = config.keys
    models = [("the draft", "--draft", config.served.draft_sizes), ("the GPUs", "--gpus", config.served.gpus)]
    missing = [(what, option) for what, option, known in models if known is None]
    numbers = [getattr(keys, name) for name in NUMBERS]
    missing += [(key, f"a value to {key}") for key in numbers if config.number(key) is None]
    return [what for what, _ in missing], [fix for _, fix in missing]


def _private_arena(config: CheckedConfig, load: ServingLoad, memory: GpuMemory) -> Iterator[Finding]:
    """TRTLLM attention normally binds the managed pool; where it does not, it sets aside an arena of its own."""
    needed = paged_arena_bytes(load, config.schema)
    if config.runtime == "trtllm" and not is_dense(load, config.schema) and needed > memory.free_bytes:
        yield warning(
            "context-arena",
            "max_batch_size",
            f"{_gib(memory.free_bytes)} to hold a private context arena, should the drafter not get the managed pool",
            _gib(needed),
            "lower max_batch_size or max_seq_len if the log says that it was allocated",
        )


def _beside_the_pool(config: CheckedConfig, load: ServingLoad, memory: GpuMemory) -> Iterator[Finding]:
    """TensorRT-LLM sizes its pool first; older releases then replace the arena, and buffer taps for each graph."""
    if pool_fraction(load, config.schema) > memory.largest_fraction:
        late = [item for item in memory.items if item.is_late]
        room = memory.free_bytes - memory.pool_bytes
        share = int(100 * memory.largest_fraction) / 100
        yield warning(
            "pool-fraction",
            "kv_cache_config.free_gpu_memory_fraction",
            f"{_gib(sum(item.bytes for item in late))} beside the pool ({' and '.join(item.name for item in late)})",
            _gib(room),
            f"lower it to {share:g}" if share else "lower max_batch_size or max_seq_len",
        )


def _arena(memory: GpuMemory) -> int:
    return next((item.bytes for item in memory.items if item.name == "context arena"), 0)


def _refusal(load: ServingLoad, memory: GpuMemory, schema: Schema) -> tuple[str, str]:
    """Problem and fix of a load that does not fit."""
    keys = schema.keys
    capacity = _gib(memory.capacity_bytes)
    gpu = f"{load.gpus.name} ({capacity})"
    arena = _arena(memory)
    if memory.free_bytes >= 0:
        pool = f"a cache pool for one request of {load.max_seq_len} tokens ({_gib(memory.request_bytes or 0)})"
        problem = f"expected {pool}, found {_gib(memory.pool_bytes)} on each {gpu}"
    elif arena:
        room = _gib(max(0, memory.free_bytes + arena))
        problem = f"expected a context arena of at most {room}, what is left of each {gpu}, found {_gib(arena)}"
    else:
        needed = _gib(sum(item.bytes for item in memory.items if not item.is_late))
        problem = f"{load.target or 'the target'} needs {needed} per GPU, and {load.gpus.name} has {capacity}"
    options = []
    if batch := min(memory.largest_batch, _largest_budget(load, keys)):
        options.append(f"{keys.max_batch_size} {batch}")
    if memory.largest_context:
        options.append(f"{keys.max_seq_len} {memory.largest_context}")
    if options:
        return problem, f"lower to {' or '.join(options)}"
    gpus = smallest_gpus(load, schema)
    if gpus is None:
        return problem, f"use larger GPUs: no number of {load.gpus.name} is enough"
    return problem, f"use at least {gpus}, with {keys.ranks} {gpus.count}, or larger GPUs"


def _largest_budget(load: ServingLoad, keys: RuntimeKeys) -> int:
    """The largest batch whose drafts are verified in one pass; SGLang's max_num_tokens bounds prompts alone."""
    return MAX_BATCH if keys.counts_window else load.max_num_tokens // (1 + load.num_draft_tokens)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
