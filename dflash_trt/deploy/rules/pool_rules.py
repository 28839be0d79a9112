# SPDX-License-Identifier: Apache-2.0
"""Rules for the pool that holds the drafter's context in TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error, unchecked, warning

SPEC = "speculative_config"
BACKEND = f"{SPEC}.attention_backend"


def prefix_reuse(config: CheckedConfig) -> Iterator[Finding]:
    """Reused prompt blocks never pass the target again, so that the drafter has no context rows for them."""
    reuse = config.setting("kv_cache_config.enable_block_reuse")
    if reuse is not True:
        return
    said = "true" if config.is_set("kv_cache_config.enable_block_reuse") else "true (its default)"
    rule = config.schema.rules["prefix_reuse"]
    key = rule["recompute_key"]
    tail = config.number(f"{SPEC}.{key}") if key else None
    if tail:
        return
    if config.setting(BACKEND) == rule["paired_attention"]:  # its context pages are reused with the target's
        yield from _paired_pools(config, said)
        return
    fix = "set kv_cache_config.enable_block_reuse to false"
    if key:
        fix += f", or {SPEC}.{key} above 0 (not for sliding-window targets under cache manager V1)"
    make = warning if config.setting(BACKEND) == "TRTLLM" else error  # its pool may be shared with the target's
    yield make("prefix-reuse", "kv_cache_config.enable_block_reuse", "false: a hit starves the drafter", said, fix)


def _paired_pools(config: CheckedConfig, said: str) -> Iterator[Finding]:
    """Settings that keep the drafter's pages from being reused with the target's (`resolve.pairs_pools`)."""
    manager = "kv_cache_config.use_kv_cache_manager_v2"
    cache = None if config.target is None else config.target.cache
    if config.setting(manager) is False:
        yield error(
            "prefix-reuse", manager, "true: V1 pairs no pools, and a hit starves the drafter", "false",
            "set it to true, or enable_block_reuse to false",
        )  # fmt: skip
    elif cache is not None and cache.recurrent is not None:
        yield warning(
            "prefix-reuse", "kv_cache_config.enable_block_reuse",
            "false: pools of a target with recurrent states are not paired, and a hit starves the drafter", said,
            "set it to false",
        )  # fmt: skip
    else:
        yield unchecked(
            "prefix-reuse", "kv_cache_config.enable_block_reuse",
            "whether the drafter gets the managed pool, without which a hit starves it",
            "look for 'using the private ctx arena' in the log",
        )  # fmt: skip


def fp8_context(config: CheckedConfig) -> Iterator[Finding]:
    """The drafter's context is BF16, whatever the target's cache is; the pool's FP8 pages do not fit it."""
    is_fp8 = "fp8" in str(config.setting("kv_cache_config.dtype")).lower()
    if config.setting(BACKEND) == "TRTLLM" and is_fp8:
        yield warning(
            "fp8-context", "kv_cache_config.dtype", "auto with TRTLLM attention: the draft's context is BF16, and in"
            " place of FP8 pages the worker may set aside an arena of its own (dflash.py @ 8d62b3e5)",
            "fp8", "look for 'using the private ctx arena' in the log, or set auto",
        )  # fmt: skip
