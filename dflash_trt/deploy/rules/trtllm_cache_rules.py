# SPDX-License-Identifier: Apache-2.0
"""Rules for TensorRT-LLM's caches with DFlash: the draft's attention kernel, its pool, and reuse of prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error, unchecked, warning

SPEC = "speculative_config"
BACKEND = f"{SPEC}.attention_backend"
PADDING = "cuda_graph_config.enable_padding"


def draft_attention(config: CheckedConfig) -> Iterator[Finding]:
    """Kernels that the GPU has."""
    backend = config.setting(BACKEND)
    if config.served.mode == "engine":
        if backend not in ("TRTLLM", "VANILLA"):
            yield error(
                "draft-attention", BACKEND, "TRTLLM (our plans read the managed pool) or VANILLA (a dense arena)",
                backend, "set it to TRTLLM",
            )  # fmt: skip
        elif backend == "TRTLLM" and config.setting(PADDING) is True:
            yield warning(
                "graph-padding", PADDING,
                "false: past their slot's pages, rows that pad a batch write into page 0 of the pool, which is another"
                " request's (dflash.py @ 414ba69f, 8d62b3e5)",
                True, f"set {PADDING} to false",
            )  # fmt: skip
        return
    has_selector = (
        config.served.draft_sizes is not None and config.served.draft_sizes.spec.candidate_selector is not None
    )
    if has_selector and backend == "TRTLLM":  # TensorRT-LLM, modeling_dflash.py, pull request 18155
        yield error(
            "draft-attention", BACKEND, "VANILLA or FA4 (a DFlash2 draft sees a finite window in both directions)",
            backend, "set it to VANILLA",
        )  # fmt: skip
        return
    kernels = config.schema.rules["draft_attention"]["kernels"]
    needed = kernels.get(backend) if isinstance(backend, str) else None
    if needed is None:
        return
    if config.served.gpus is None:
        yield unchecked("draft-attention", BACKEND, f"whether the GPU has {backend} kernels", "give --gpus")
        return
    gpu = config.served.gpus.gpu
    if list(gpu.compute_capability) not in needed:
        names = " or ".join(f"SM {major}.{minor}" for major, minor in needed)
        yield error(
            "draft-attention", BACKEND, f"{names} for {backend}", f"{config.served.gpus.name} ({gpu.sm})",
            "set it to VANILLA",
        )  # fmt: skip


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
    if config.setting(BACKEND) == rule["paired_attention"]:  # the drafter's pages are reused with the target's
        yield from _paired_pools(config, said)
        return
    fix = "set kv_cache_config.enable_block_reuse to false"
    if key:
        fix += f", or {SPEC}.{key} above 0 (not for sliding-window targets under cache manager V1)"
    make = warning if config.setting(BACKEND) == "TRTLLM" else error  # the drafter may share the target's pool
    reuse_key = "kv_cache_config.enable_block_reuse"
    yield make("prefix-reuse", reuse_key, "false: a hit starves the drafter", said, fix, **{reuse_key: False})


def _paired_pools(config: CheckedConfig, said: str) -> Iterator[Finding]:
    """Settings that keep the drafter's pages from being reused with the target's (`resolve.py`, pairs_pools)."""
    manager = "kv_cache_config.use_kv_cache_manager_v2"
    cache = None if config.served.target_sizes is None else config.served.target_sizes.cache
    if config.setting(manager) is False:
        yield error(
            "prefix-reuse", manager, "true: V1 pairs no pools, and a hit starves the drafter", "false",
            "set it to true, or kv_cache_config.enable_block_reuse to false",
        )  # fmt: skip
    elif cache is not None and cache.recurrent is not None:
        yield warning(
            "prefix-reuse", "kv_cache_config.enable_block_reuse",
            "false: pools of a target with recurrent states are not paired, and a hit starves the drafter", said,
            "set it to false", **{"kv_cache_config.enable_block_reuse": False},
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
            "fp8", "set it to auto, unless the log lacks 'using the private ctx arena'",
        )  # fmt: skip


def disk_cache(config: CheckedConfig) -> Iterator[Finding]:
    """A cache on disk needs a directory."""
    size, path = config.number("kv_cache_config.disk_cache_size"), config.setting("kv_cache_config.disk_cache_path")
    if size and not path:
        yield error(
            "disk-cache", "kv_cache_config.disk_cache_path", f"a directory for {size} bytes", "none",
            "set it to a directory, or leave kv_cache_config.disk_cache_size out",
        )  # fmt: skip
