# SPDX-License-Identifier: Apache-2.0
"""Targets that transformers runs here, and their type, determined before any weight is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, __version__

from dflash_trt.api.runtime_options import check_dtype
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError

NOT_RUN = {
    "kimi_k2": "a model that transformers has code for; this one's is its checkpoint's own, which is never run",
    "modelopt": "weights that transformers reads; it knows no ModelOpt checkpoint",
    "compressed-tensors": "weights that transformers reads; it needs the package compressed-tensors for these",
}
"""A model_type or quant_method that transformers 5.23 does not run here, and what was expected in its place."""


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a target that transformers does not run, with the runtime that does."""
    config = Facts.load(directory / "config.json")
    model_type = config.text("model_type")
    nested = [config.section("text_config")] if "text_config" in config else []
    quantised = [facts.section("quantization_config") for facts in (config, *nested) if "quantization_config" in facts]
    # Below images, transformers does have code for kimi_k2: deepseek_v3's.
    for facts in (config, *quantised):
        for key in ("model_type", "quant_method"):
            value = facts.optional(key, facts.text)
            is_loaded = value == "compressed-tensors" and find_spec("compressed_tensors") is not None
            if value in NOT_RUN and not is_loaded:
                runtimes = "TensorRT-LLM, vLLM or SGLang" if value == "modelopt" else "vLLM or SGLang"
                raise facts.error(key, NOT_RUN[value], hint=_elsewhere(runtimes))
    if model_type in CONFIG_MAPPING:
        return
    own = " (the checkpoint brings its own code along, which is never run)" if "auto_map" in config else ""
    raise config.error(
        "model_type",
        f"a model that transformers {__version__} has code for{own}",
        hint=_elsewhere("TensorRT-LLM, vLLM or SGLang"),
    )


def _elsewhere(runtimes: str) -> str:
    return f"serve this target with {runtimes}: dflash-trt serve-config --list"


FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def target_dtype(asked: str, directory: Path, weights: Mapping[str, StoredTensor], device: str = "cpu") -> torch.dtype:
    """The type to compute a target in, whose tensors are `weights`.

    `auto` is BF16 for a BF16 checkpoint on a GPU, and FLOAT otherwise: FLOAT holds each value of a BF16, F16 or F32
    checkpoint, and rounding differences between a block and single tokens are then too small to flip a choice. Raises
    RequestError for an unknown type, CheckpointError for BF16 where the checkpoint's values would be rounded.
    """
    check_dtype(asked)
    if asked == "float32" or (asked == "auto" and device == "cpu"):
        return torch.float32
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    stored = max((name for name in FLOATS if sizes[name]), key=lambda name: sizes[name], default="BF16")
    if sizes["F16"]:
        stored = "F16"
    if stored != "BF16":
        if asked == "auto":
            return torch.float32
        example = next(tensor for tensor in weights.values() if tensor.dtype == stored)
        raise CheckpointError(
            f"{directory}: dtype bfloat16: expected weights in bfloat16, found {FLOATS[stored]} ({example.name}), which"
            " bfloat16 would round",
            hint="decode it with --dtype float32, which holds every value",
        )
    return torch.bfloat16
