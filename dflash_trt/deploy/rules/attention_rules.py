# SPDX-License-Identifier: Apache-2.0
"""Attention backend, KV cache type and GPU of target and draft: a table for each runtime, from its own functions.

vLLM 0.33.0: validate_configuration and what it calls in vllm/v1/attention/backends/{flash_attn,flashinfer,triton_attn,
flex_attention,turboquant_attn}.py; flash_attn_supports_kv_cache_dtype and get_flash_attn_version in fa_utils.py there.
SGLang 0.5.23: create_flashattention_v3_backend in sglang/srt/layers/attention/attention_registry.py;
handle_attention_backend_compatibility in arg_groups/attention_hook.py; DRAFT_ATTENTION_BACKEND_CHOICES in choices.py.
Backends that are not listed (those of MLA, and other vendors') are not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, warning

Capability = tuple[int, int]
BF16 = ("auto", "float16", "bfloat16")
FP8, NVFP4 = ("fp8", "fp8_e4m3"), ("nvfp4", "nvfp4_4over6")
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities that stand for an unknown GPU."""


class VllmBackend(msgspec.Struct, frozen=True, kw_only=True):
    """Caches, GPUs and drafts that one of vLLM's backends supports."""

    cache_dtypes: tuple[str, ...]
    lowest: Capability = (0, 0)
    highest: Capability = (99, 0)
    is_non_causal: bool = True
    """Whether it attends in both directions within a block, as DFlash's drafts do."""
    head_dims: tuple[int, ...] = ()
    """All of them if empty."""


VLLM = {
    "FLASH_ATTN": VllmBackend(cache_dtypes=(*BF16, *FP8), lowest=(8, 0)),
    "FLASHINFER": VllmBackend(
        cache_dtypes=(*BF16, *FP8, "fp8_e5m2", *NVFP4), lowest=(8, 0), highest=(12, 1), head_dims=(64, 128, 256, 512)
    ),
    "TRITON_ATTN": VllmBackend(
        cache_dtypes=(*BF16, *FP8, "fp8_e5m2", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
    ),
    "FLEX_ATTENTION": VllmBackend(cache_dtypes=BF16),
    "TURBOQUANT": VllmBackend(cache_dtypes=TURBOQUANT, is_non_causal=False),
}


def vllm_problem(
    backend: str, cache_dtype: str, capability: Capability, *, head_dim: int | None = None, is_non_causal: bool = False
) -> str | None:
    """Why vLLM refuses a backend of the table with this cache on a GPU; None if it does not."""
    known, at = VLLM[backend], f"SM {capability[0]}.{capability[1]}"
    if not known.lowest <= capability <= known.highest:
        return f"{backend} does not run on {at}"
    if is_non_causal and not known.is_non_causal:
        return f"{backend} has causal attention alone, and a DFlash draft attends in both directions"
    if head_dim is not None and known.head_dims and head_dim not in known.head_dims:
        return f"{backend} has no heads of {head_dim}"
    if cache_dtype not in known.cache_dtypes:
        return f"{backend} does not read a KV cache of {cache_dtype}"
    if backend == "FLASH_ATTN" and cache_dtype in FP8 and not _has_flash_fp8(capability, head_dim):
        return f"FLASH_ATTN reads an FP8 KV cache only on SM 9.x, and on 10.x with heads of up to 128, not on {at}"
    if backend == "FLASHINFER" and cache_dtype in NVFP4 and capability[0] in (8, 9, 12):
        if cache_dtype != "nvfp4" or head_dim == 64:
            return f"FLASHINFER reads no {cache_dtype} KV cache on {at}" + (
                " with heads of 64" if head_dim == 64 else ""
            )
    elif backend == "FLASHINFER" and cache_dtype in NVFP4 and capability[0] != 10:
        return f"FLASHINFER reads no NVFP4 KV cache on {at}"
    return None


def vllm_backends(
    cache_dtype: str, capability: Capability, *, head_dim: int | None = None, is_non_causal: bool = False
) -> list[str]:
    """Backends of the table that vLLM may choose by itself."""
    return [
        name
        for name in VLLM
        if vllm_problem(name, cache_dtype, capability, head_dim=head_dim, is_non_causal=is_non_causal) is None
    ]


def is_vllm_cache_dtype(cache_dtype: str) -> bool:
    """Whether a backend of the table reads this type on any GPU."""
    return any(cache_dtype in backend.cache_dtypes for backend in VLLM.values())


def _has_flash_fp8(capability: Capability, head_dim: int | None) -> bool:
    if capability[0] == 9:  # FlashAttention 3; 4 for heads beyond 256
        return head_dim is None or head_dim <= 256 or head_dim == 512
    return capability[0] == 10 and (head_dim is None or head_dim <= 128)  # 4; 2 for wider heads


SGLANG = {"fa3": (8, 9), "trtllm_mha": (9, 10, 12)}
"""Major compute capabilities of SGLang's backends for models without MLA; others of its backends run on any."""
SGLANG_DRAFT = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha")
"""Backends that a DFlash draft may have; SGLang puts flashinfer in the place of others."""


def sglang_problem(backend: str, cache_dtype: str, capability: Capability, *, is_prefill: bool) -> str | None:
    """Why SGLang refuses a backend on a GPU; None if it does not, or is not in the table."""
    majors = SGLANG.get(backend)
    if majors is not None and capability[0] not in majors:
        return f"{backend} runs on SM {_listed(majors)} alone, not on {capability[0]}.{capability[1]}"
    if backend == "trtllm_mha" and is_prefill and capability[0] == 12 and cache_dtype == "fp8_e4m3":
        return "trtllm_mha has no prefill with an fp8_e4m3 KV cache on SM 12.x"
    return None


def _listed(majors: Iterable[int]) -> str:
    return ", ".join(f"{major}.x" for major in majors)


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
