# SPDX-License-Identifier: Apache-2.0
"""The tables of attention backends against the functions of vLLM 0.33.0 and SGLang 0.5.23, and what they say."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.rules.attention_rules import CAPABILITIES, SGLANG_DRAFT, VLLM, sglang_problem, vllm_problem
from tests.deploy.rules.commands import found, sglang, vllm
from tests.deploy.wheels import SGLANG as SGLANG_WHEEL
from tests.deploy.wheels import VLLM as VLLM_WHEEL
from tests.deploy.wheels import definitions, sources

FILES = {
    "FLASH_ATTN": ("flash_attn", "FlashAttentionBackend"), "FLASHINFER": ("flashinfer", "FlashInferBackend"),
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend"),
    "FLEX_ATTENTION": ("flex_attention", "FlexAttentionBackend"),
    "TURBOQUANT": ("turboquant_attn", "TurboQuantAttentionBackend"),
}  # fmt: skip
METHODS = ("supports_", "supported_", "get_supported", "validate_configuration", "is_mla", "is_sparse")
HEAD_DIMS = (64, 96, 128, 192, 256, 512)


class Platform:
    """A GPU as vLLM's functions ask for it."""

    capability: Any
    cache: Any
    """Part of the configuration whose type of cache the functions read."""

    def get_device_capability(self) -> Any:
        return self.capability

    def is_device_capability_family(self, family: int) -> bool:
        return bool(self.capability.major == family // 10)

    def has_device_capability(self, at_least: int) -> bool:
        return bool(self.capability.major * 10 + self.capability.minor >= at_least)

    def is_cuda(self) -> bool:
        return True

    def is_xpu(self) -> bool:
        return False

    is_rocm = is_xpu


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Platform]:
    """VLLM's backend classes with the functions that decide, and the GPU that they see."""
    package = sources(*VLLM_WHEEL) / "vllm"
    platform = Platform()
    cache, parallel = SimpleNamespace(cache_dtype="auto"), SimpleNamespace(decode_context_parallel_size=1)
    current = SimpleNamespace(
        cache_config=cache, parallel_config=parallel, model_config=None,
        attention_config=SimpleNamespace(flash_attn_version=None),
    )  # fmt: skip
    config = SimpleNamespace(get_current_vllm_config_or_none=lambda: current)
    torch = SimpleNamespace(float16="float16", bfloat16="bfloat16", float32="float32", dtype=str)
    base: dict[str, Any] = {
        "torch": torch, "current_platform": platform, "logger": logging.getLogger("vllm"), "Enum": Enum,
        "ABC": object, "get_current_vllm_config_or_none": lambda: current,
        "supports_trtllm_attention": lambda **_: True,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False), "NamedTuple": NamedTuple,
        "StrEnum": StrEnum, "IntEnum": IntEnum, "FA4_HD256_PAGE_SIZE": 128, "dataclass": dataclass,
    }  # fmt: skip
    base["logger"].warning_once = base["logger"].info_once = lambda *_, **__: None
    interface: dict[str, Any] = dict(base)
    flash = package / "vllm_flash_attn/flash_attn_interface.py"
    names = ["_is_fa2_supported", "_is_fa3_supported", "_is_fa4_supported"]
    names += ["is_fa_version_supported", "fa_version_unsupported_reason"]
    interface |= {f"FA{n}_AVAILABLE": True for n in (2, 3, 4)}
    definitions(flash, names, interface)
    modules = {"vllm": {}, "vllm.platforms": {"current_platform": platform}, "vllm.config": vars(config),
               "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda _: None},
               "vllm.vllm_flash_attn": {}, "vllm.vllm_flash_attn.flash_attn_interface": interface}  # fmt: skip
    for name, values in modules.items():
        stub = ModuleType(name)
        stub.__dict__.update({key: value for key, value in values.items() if not key.startswith("__")})
        monkeypatch.setitem(sys.modules, name, stub)
    definitions(package / "platforms/interface.py", ["DeviceCapability"], base)
    definitions(
        package / "v1/kv_cache_interface.py", ["KVQuantMode", "get_kv_quant_mode", "is_quantized_kv_cache"], base
    )
    definitions(
        package / "v1/attention/backends/fa_utils.py",
        ["get_flash_attn_version", "uses_fa4_hd256_kernel", "_fa4_hd256_fallback_reason", "is_fa_version_supported",
         "flash_attn_supports_kv_cache_dtype", "flash_attn_supports_sinks", "is_flash_attn_varlen_func_available"],
        base,
    )  # fmt: skip
    definitions(package / "v1/attention/backend.py", ["AttentionType", "MultipleOf"], base)
    definitions(package / "v1/attention/backend.py", ["AttentionBackend"], base, methods=METHODS)
    definitions(package / "v1/attention/backends/flashinfer.py", ["_nvfp4_kv_on_fa2"], base)
    for file, name in FILES.values():
        definitions(package / f"v1/attention/backends/{file}.py", [name], base, methods=METHODS)
    platform.cache = cache
    return base, platform


@pytest.mark.full
@pytest.mark.parametrize("backend", FILES)
def test_the_table_of_vllm_is_its_own(backend: str, backends: tuple[dict[str, Any], Platform]) -> None:
    """Every combination of type, GPU, head size and direction, by vLLM's validate_configuration."""
    namespace, platform = backends
    real, compared = namespace[FILES[backend][1]], 0
    types = sorted({dtype for each in VLLM.values() for dtype in each.cache_dtypes})
    for capability in ((7, 5), *CAPABILITIES, (11, 0)):
        platform.capability = namespace["DeviceCapability"](*capability)
        for dtype in types:
            platform.cache.cache_dtype = dtype
            for head_dim in HEAD_DIMS:
                for non_causal in (False, True):
                    reasons = real.validate_configuration(
                        head_size=head_dim, dtype="bfloat16", kv_cache_dtype=dtype, block_size=None, use_mla=False,
                        has_sink=False, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
                        device_capability=platform.capability, attn_type="decoder", use_non_causal=non_causal,
                    )  # fmt: skip
                    if backend == "FLASH_ATTN" and head_dim == 512:
                        continue
                    problem = vllm_problem(backend, dtype, capability, head_dim=head_dim, is_non_causal=non_causal)
                    assert (problem is None) == (not reasons), (
                        capability,
                        dtype,
                        head_dim,
                        non_causal,
                        reasons,
                        problem,
                    )
                    compared += 1
    assert compared > 1000


def _real_sglang() -> dict[str, Any]:
    package = sources(*SGLANG_WHEEL) / "sglang/srt"
    namespace: dict[str, Any] = {"_is_musa": False, "logger": logging.getLogger("sglang")}
    definitions(package / "layers/attention/attention_registry.py", ["create_flashattention_v3_backend"], namespace)
    definitions(package / "arg_groups/choices.py", ["DRAFT_ATTENTION_BACKEND_CHOICES"], namespace)
    definitions(package / "arg_groups/overrides.py", ["_attention_backend_fa3_fp8_fallback"], namespace)
    definitions(package / "utils/common.py", ["is_no_spec_infer_or_topk_one"], namespace)
    definitions(
        package / "arg_groups/model_override_base.py", ["get_default_attn_backend", "_forces_eagle_topk_one"], namespace
    )
    return namespace


@pytest.mark.full
def test_the_table_of_sglang_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = _real_sglang()
    assert set(SGLANG_DRAFT) == set(namespace["DRAFT_ATTENTION_BACKEND_CHOICES"]) - {"ascend", "intel_xpu"}
    stub = ModuleType("sglang.srt.layers.attention.flashattention_backend")
    stub.FlashAttentionBackend = lambda runner: runner  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    for capability in ((7, 5), *CAPABILITIES, (11, 0)):
        namespace["get_device_capability"] = lambda capability=capability: capability
        is_refused = sglang_problem("fa3", "auto", capability, is_prefill=False) is not None
        with pytest.raises(AssertionError) if is_refused else contextlib.nullcontext():
            namespace["create_flashattention_v3_backend"](SimpleNamespace(use_mla_backend=False))
    view = SimpleNamespace(attention_backend="fa3", kv_cache_dtype="fp8_e5m2")
    assert namespace["_attention_backend_fa3_fp8_fallback"](view) == {"attention_backend": "triton"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("topk", "page", "is_changed"), [(None, None, False), (1, None, False), (4, None, True), (1, 64, True)]
)
def test_eagle_topk_decides_the_backend_of_sglang(
    topk: Any, page: Any, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = _real_sglang()
    cfg = SimpleNamespace(speculative_eagle_topk=topk, page_size=page, speculative_algorithm="DFLASH", tp_size=1)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[]), has_asymmetric_kv=False, has_attention_sinks=False
    )
    info = ModuleType("sglang.srt.speculative.spec_info")
    info.SpeculativeAlgorithm = SimpleNamespace(DFLASH=SimpleNamespace(name="DFLASH"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, info.__name__, info)
    namespace |= {"resolving_view": lambda _: cfg, "resolved_view": lambda _: cfg, "is_mps": lambda: False,
                  "current_platform": SimpleNamespace(is_out_of_tree=lambda: False)}  # fmt: skip
    for is_hopper, usual in ((True, "fa3"), (False, "trtllm_mha")):
        gpu = SimpleNamespace(
            is_hopper_with_cuda_12_3=is_hopper, is_sm100=not is_hopper, is_hip=False, has_flashinfer=True
        )
        namespace["get_platform"] = lambda gpu=gpu: gpu
        chosen = namespace["get_default_attn_backend"](None, False, model)
        assert chosen == ("flashinfer" if is_changed else usual)


DRAFT = "z-lab/Qwen3-8B-DFlash-b16"
OWN = "--speculative-config.kv_cache_dtype auto"


def vllm_cases() -> Iterator[tuple[str, str | None, list[tuple[str, str]]]]:
    """Flags, GPU, and severity and key of each finding."""
    target, draft, dtype = "attention_backend", "speculative_config.attention_backend", "kv_cache_dtype"
    yield "--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", "rtx4090x1", [(ERROR, target)]
    yield "--kv-cache-dtype fp8 --attention-backend flash_attn", "rtx5090x1", [(ERROR, target)]
    yield "--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", "h200x1", []
    yield "--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", None, [(UNCHECKED, target)]
    yield "--kv-cache-dtype fp8_e5m2 --attention-backend FLASH_ATTN", None, [(ERROR, target)]
    yield "--kv-cache-dtype fp8_e5m2 --attention-backend FLASHINFER", None, []
    yield "--kv-cache-dtype turboquant_3bit_nc", "h200x1", [(ERROR, dtype)]
    yield f"--kv-cache-dtype turboquant_3bit_nc {OWN}", "h200x1", []
    yield "--kv-cache-dtype int8_per_token_head", "h200x1", []
    yield "--speculative-config.attention_backend TURBOQUANT", "h200x1", [(ERROR, draft)]
    yield "--attention-backend FLASHMLA", "h200x1", [(UNCHECKED, target)]
    yield "--kv-cache-dtype fp8_ds_mla", "h200x1", []
    yield "", "h200x1", []


@pytest.mark.parametrize(("flags", "gpus", "expected"), list(vllm_cases()))
def test_vllm(flags: str, gpus: str | None, expected: list[tuple[str, str]]) -> None:
    findings = found(f"{vllm(DRAFT)} {flags}", "attention-backend", gpus=gpus)
    assert [(finding.severity, finding.key) for finding in findings] == expected


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        ("--attention-backend fa3", "b200x1", [ERROR]),
        ("--speculative-draft-attention-backend fa3", "rtx5090x1", [ERROR]),
        ("--decode-attention-backend fa3", "h200x1", []),
        ("--attention-backend fa3", None, [UNCHECKED]),
        ("--attention-backend trtllm_mha", "rtx4090x1", [ERROR]),
        ("--prefill-attention-backend trtllm_mha --kv-cache-dtype fp8_e4m3", "rtx5090x1", [ERROR]),
        ("--decode-attention-backend trtllm_mha --kv-cache-dtype fp8_e4m3", "rtx5090x1", []),
        ("--attention-backend fa3 --kv-cache-dtype fp8_e5m2", "h200x1", [WARNING]),
        ("--speculative-draft-attention-backend trtllm_mla", "b200x1", [WARNING]),
        ("--attention-backend triton", "b200x1", []),
    ],
)  # fmt: skip
def test_sglang(flags: str, gpus: str | None, expected: list[str]) -> None:
    findings = found(f"{sglang(DRAFT)} {flags}", "attention-backend", gpus=gpus)
    assert [finding.severity for finding in findings] == expected
