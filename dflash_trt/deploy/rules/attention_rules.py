# SPDX-License-Identifier: Apache-2.0
"""Attention backend, KV cache type and GPU of target and draft, for vLLM and SGLang (deploy/attention_backends.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflash_trt.deploy.attention_backends import (
    CAPABILITIES,
    SGLANG_DRAFT,
    VLLM,
    Capability,
    is_vllm_cache_dtype,
    sglang_problem,
    vllm_backends,
    vllm_problem,
)
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, warning

RULE = "attention-backend"
SPEC = "speculative_config"
DRAFT = "speculative_draft_attention_backend"


def vllm_attention(config: CheckedConfig) -> Iterator[Finding]:
    """The target's backend, and the draft's, which has a cache type and a backend of its own or inherits the type."""
    dtype = str(config.setting("kv_cache_dtype"))
    yield from _vllm(config, "attention_backend", dtype)
    if config.method in BLOCKS:
        draft = config.served.draft_sizes
        own = config.setting(f"{SPEC}.kv_cache_dtype")
        yield from _vllm(
            config, f"{SPEC}.attention_backend", str(own or dtype), head_dim=draft.spec.head_dim if draft else None,
            is_non_causal=config.method == "dflash", inherits=own is None,
        )  # fmt: skip


def _vllm(
    config: CheckedConfig, key: str, dtype: str, *, head_dim: int | None = None, is_non_causal: bool = False,
    inherits: bool = False,
) -> Iterator[Finding]:  # fmt: skip
    chosen = config.setting(key)
    backend = str(chosen).upper()
    if chosen is None:
        if not is_vllm_cache_dtype(dtype):
            return
        fix = f"set {SPEC}.kv_cache_dtype to auto" if inherits else "set kv_cache_dtype to auto"
        verb = "attends in both directions over" if is_non_causal else "reads"
        problem = f"no backend of vLLM 0.33 {verb} a KV cache of {dtype}" + (", which the draft inherits" * inherits)

        def none_reads(capability: Capability) -> str | None:
            found = vllm_backends(dtype, capability, head_dim=head_dim, is_non_causal=is_non_causal)
            return None if found else problem

        yield from _judged(config, "kv_cache_dtype", none_reads, fix)
    elif backend in VLLM:

        def refused(capability: Capability) -> str | None:
            return vllm_problem(backend, dtype, capability, head_dim=head_dim, is_non_causal=is_non_causal)

        capability = _capability(config)
        others = vllm_backends(dtype, capability or (9, 0), head_dim=head_dim, is_non_causal=is_non_causal)
        yield from _judged(config, key, refused, f"set it to {others[0]}" if others else "set kv_cache_dtype to auto")
    else:
        problem = f"{chosen} with a KV cache of {dtype}: of this backend nothing was looked up"
        yield Finding(RULE, UNCHECKED, key, problem, "look at the first lines of the server's log")


def _judged(
    config: CheckedConfig, key: str, problem: Callable[[Capability], str | None], fix: str
) -> Iterator[Finding]:
    """An error for what the GPU refuses, or every GPU; not checked where an unknown one decides."""
    capability = _capability(config)
    problems = [problem(each) for each in (CAPABILITIES if capability is None else (capability,))]
    found = next((each for each in problems if each is not None), None)
    if found is None:
        return
    if all(problems):
        yield Finding(RULE, ERROR, key, found, fix)
    else:
        yield Finding(RULE, UNCHECKED, key, f"the GPU is not known, and {found}", "give --gpus")


def _capability(config: CheckedConfig) -> Capability | None:
    return None if config.served.gpus is None else config.served.gpus.gpu.compute_capability


def sglang_attention(config: CheckedConfig) -> Iterator[Finding]:
    """The target's backend for both phases, and the draft's."""
    dtype = str(config.setting("kv_cache_dtype"))
    both = config.setting("attention_backend")
    for key in ("attention_backend", "prefill_attention_backend", "decode_attention_backend", DRAFT):
        backend = config.setting(key)
        if not isinstance(backend, str) or (key == DRAFT and config.method != "dflash"):
            continue
        phases = [True] if key.startswith("prefill") else [False] if key.startswith("decode") else [True, False]

        def refused(capability: Capability, backend: str = backend, phases: list[bool] = phases) -> str | None:
            problems = (sglang_problem(backend, dtype, capability, is_prefill=each) for each in phases)
            return next((each for each in problems if each is not None), None)

        yield from _judged(config, key, refused, "leave it out, or set it to flashinfer or triton")
    if both == "fa3" and dtype == "fp8_e5m2":
        yield Finding(
            RULE, WARNING, "attention_backend", "fa3 reads no fp8_e5m2 KV cache, and SGLang puts triton in its place",
            "set kv_cache_dtype to fp8_e4m3",
        )  # fmt: skip
    draft = config.setting(DRAFT)
    if config.method == "dflash" and isinstance(draft, str) and draft not in SGLANG_DRAFT:
        yield warning(RULE, DRAFT, f"one of {', '.join(SGLANG_DRAFT)}", f"{draft}, for which SGLang takes flashinfer",
                      "leave it out")  # fmt: skip
