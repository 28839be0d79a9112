# SPDX-License-Identifier: Apache-2.0
"""Refuses plans that could not be built, or would be wrong, before TensorRT is loaded."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dflash_trt import _C
from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.engine.plans.machine import check_precision, check_served, sm_of
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES
from dflash_trt.engine.signatures import MAX_CONTEXT
from dflash_trt.errors import BuildError


def check_build(
    spec: PartialDraftSpec, algorithms: Collection[str], options: PlanOptions, *, has_timing_cache: bool = False
) -> None:
    """Raises BuildError for plans that the GPUs, the chosen TensorRT or the attention plugin do not take."""
    check_options(options, has_timing_cache=has_timing_cache)
    check_gpus(algorithms, options)
    check_limits(spec, options.max_batch_size, options.max_seq_len)


def check_options(options: PlanOptions, *, has_timing_cache: bool = False) -> None:
    """Raises BuildError, by the option's name, for what the chosen TensorRT does not have."""
    rtx = "TensorRT-RTX builds for a list of GPUs (--gpu) and chooses kernels where a plan runs"
    given = {
        "--gpu": options.runtime == "tensorrt" and bool(options.compute_capabilities),
        "--hardware-compatibility": options.runtime == "tensorrt_rtx" and options.hardware_compatibility != "none",
        "--version-compatible": options.runtime == "tensorrt_rtx" and options.version_compatible,
        "--timing-cache": options.runtime == "tensorrt_rtx" and has_timing_cache,
    }
    for option, is_given in given.items():
        if is_given:
            why = "TensorRT builds on the GPU that runs the plan" if option == "--gpu" else rtx
            raise BuildError(
                f"{option}: expected an option of {RUNTIMES[options.runtime].title}, found one that it does not have",
                hint=f"leave it out: {why}",
            )


def check_gpus(algorithms: Collection[str], options: PlanOptions) -> None:
    """Raises BuildError for number formats, or a TensorRT, that one of the GPUs in `options` lacks."""
    if options.runtime == "tensorrt_rtx":
        check_served(options.compute_capabilities)
    capabilities = {sm_of(capability) for capability in options.compute_capabilities}
    if options.hardware_compatibility == "ampere_plus":
        capabilities.add((8, 0))  # where its plans must run, too
    check_precision(algorithms, capabilities)


def for_able_gpus(algorithms: Collection[str], options: PlanOptions) -> tuple[PlanOptions, dict[str, str]]:
    """`options` without the GPUs that lack a number format of the draft, and the reason by compute capability.

    Where none is left they all stay, for `check_gpus` to refuse.
    """
    lacking = {}
    for capability in options.compute_capabilities:
        try:
            check_precision(algorithms, [sm_of(capability)])
        except BuildError as problem:
            lacking[capability] = f"{problem.message}; {problem.hint}"
    able = tuple(capability for capability in options.compute_capabilities if capability not in lacking)
    if not able:
        return options, {}
    return msgspec.structs.replace(options, compute_capabilities=able), lacking


def check_limits(spec: PartialDraftSpec, max_batch_size: int, max_seq_len: int) -> None:
    """Raises BuildError for a draft, batch or context that the attention plugin does not take.

    TensorRT would ask the plugin on the GPU machine, once the plan of the context graph is built, and about contexts
    never: the plugin answers NaN to longer ones.
    """
    if max_seq_len > MAX_CONTEXT:
        raise BuildError(
            f"max_seq_len: expected at most {MAX_CONTEXT}, which the attention plugin reads, found {max_seq_len}",
            hint="lower max_seq_len, or run the draft in ONNX Runtime",
        )
    for batch, block, hint in (
        (1, spec.block_size, "run the draft in ONNX Runtime, which takes any"),
        (max_batch_size, 1, "lower max_batch_size"),
    ):
        try:
            _C.kv_injection_attention_check(_attributes(spec), batch, block)
        except ValueError as problem:
            raise BuildError(f"the attention plugin's {problem}", hint=hint) from None


def _attributes(spec: PartialDraftSpec) -> _C.KVInjectionAttributes:
    """Attributes of a dummy layer; only the sizes matter."""
    return _C.KVInjectionAttributes(
        layer=0,
        num_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=1e-6,
        softmax_scale=1.0,
        sliding_window=0,
        causal=0,
        k_scale=1.0,
        v_scale=1.0,
        fp8_cache=0,
        has_qkv_bias=0,
        fp8_output=0,
        output_scale=1.0,
    )
