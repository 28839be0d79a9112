# SPDX-License-Identifier: Apache-2.0
"""Names quantised drafts that are not read, by configuration or tensors, and the runtimes that serve them."""

from __future__ import annotations

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.number_formats import FORMATS, FP8
from dflash_trt.checkpoint.quantization import COMPRESSED, MIXED, SECTION, Claims, Quantization
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError, cut

INSTEAD = "for dflash-trt give the checkpoint that it was quantised from, and a --recipe"
UNKNOWN = "its own quantiser names who serves"
METHODS = {
    "auto-round": ("AutoRound", "vLLM and SGLang serve"),
    "awq": ("AWQ", "vLLM and SGLang serve"),
    "bitsandbytes": ("bitsandbytes", "vLLM serves"),
    "exl3": ("EXL3", "exllamav3 serves"),
    "fp8": ("FP8 in blocks, as DeepSeek's", "vLLM and SGLang serve"),
    "gptq": ("GPTQ", "vLLM and SGLang serve"),
    "hqq": ("HQQ", UNKNOWN),
    "mxfp4": ("MXFP4, as gpt-oss's experts", "vLLM and SGLang serve"),
    "quark": ("AMD Quark", "vLLM serves"),
    "torchao": ("torchao", "vLLM serves"),
}
"""Name and servers by quant_method."""
NAMES = {"intel/auto-round": "auto-round", "auto_round": "auto-round"}
ALGORITHMS = {
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8 with a scale for each row", "vLLM serves"),
    "FP8_PB_WO": ("FP8 in blocks", "vLLM serves"),
    "MXFP4": ("MXFP4", UNKNOWN),
    "MXFP8": ("MXFP8", "vLLM serves"),  # not here: findings/tensorrt_rtx_multiplies_mxfp8_in_bfloat16.sh
    "NVFP4_AWQ": ("NVFP4 with AWQ's pre_quant_scale", "TensorRT-LLM serves"),
    "NVFP4_SVD": ("NVFP4 with SVDQuant's low-rank part", UNKNOWN),
    "W4A8_AWQ": ("INT4 weights with FP8 activations", "TensorRT-LLM serves"),
    "W4A8_MXFP4_FP8": ("MXFP4 weights with FP8 activations", "TensorRT-LLM serves"),
    "W4A8_NVFP4_FP8": ("NVFP4 weights with FP8 activations", "TensorRT-LLM serves"),
    "W8A16": ("INT8 weights", "TensorRT-LLM serves"),
    "W8A8_SQ_PER_CHANNEL": ("INT8 with SmoothQuant", "TensorRT-LLM serves"),
}
"""Name and servers by Model Optimizer's quant_algo in capitals; 0.47 writes some in small letters, as "mxfp4"."""
TENSORS = {
    ".qweight": ("GPTQ's or AWQ's qweight", "vLLM and SGLang serve"),
    ".weight.absmax": ("bitsandbytes' absmax", "vLLM serves"),
    ".trellis": ("EXL3's trellis", "exllamav3 serves"),
}
"""Name and servers by the end of a tensor's name, for drafts whose configuration says nothing."""


def refuse_foreign(config: Facts, claims: Claims) -> None:
    """Raises CheckpointError, naming format and servers, for a draft of an unsupported quantiser or format."""
    method = config.peek(SECTION).get("quant_method")
    if isinstance(method, str) and method not in ("modelopt", COMPRESSED):
        found, servers = METHODS.get(NAMES.get(method, method), (cut(method), UNKNOWN))
        raise _refusal(f"{config.file}: quantization_config", f"weights of {found}", servers)
    if method == COMPRESSED:
        return
    for place, section in claims:
        algorithm = section.values().get("quant_algo")
        if not isinstance(algorithm, str) or algorithm in (*FORMATS, MIXED):
            continue
        found, servers = ALGORITHMS.get(algorithm.upper(), (cut(algorithm), UNKNOWN))
        raise _refusal(f"{place}.quant_algo", f"Model Optimizer's {algorithm} ({found})", servers)


def refuse_foreign_tensors(weights: Weights) -> None:
    """Raises CheckpointError for tensors of an unsupported quantiser that the configuration does not name."""
    for end, (found, servers) in TENSORS.items():
        if (name := next((name for name in weights if name.endswith(end)), None)) is not None:
            raise _refusal(f"{weights[name].file}: tensor {name!r}", found, servers)


def refuse_uncalibrated(claims: Claims, quantization: Quantization) -> None:
    """Raises CheckpointError for scales that Model Optimizer's configuration claims and that no calibration wrote."""
    for place, section in claims:
        cache = section.values().get("kv_cache_quant_algo")
        if cache == FP8 and not quantization.fp8_kv_cache:
            raise CheckpointError(
                f"{place}.kv_cache_quant_algo is {FP8}, but there are no k_scale and v_scale tensors: the context cache"
                " was never calibrated",
                hint="calibrate the export, or set kv_cache_quant_algo to null for a BF16 cache",
            )
        if isinstance(cache, str) and cache != FP8:
            raise CheckpointError(
                f"{place}.kv_cache_quant_algo is {cut(cache)}; only an {FP8} context cache with its scales is read",
                hint="TensorRT-LLM serves this draft; for dflash-trt export it with an FP8 or BF16 cache",
            )
        algorithm = section.values().get("quant_algo")
        weight_only = {"NVFP4": "W4A16_NVFP4"}.get(str(algorithm))
        if weight_only is not None and set(quantization.modules.values()) == {weight_only}:
            raise CheckpointError(
                f"{place}.quant_algo is {algorithm}, but no layer has an input_scale: activations were never"
                " calibrated",
                hint=f"calibrate the export, or write {weight_only} there to use the weights alone",
            )


def _refusal(place: str, found: str, servers: str) -> CheckpointError:
    return CheckpointError(
        f"{place}: expected modelopt's or compressed-tensors' formats that are read, found {found}",
        hint=f"{servers} this draft; {INSTEAD}",
    )
