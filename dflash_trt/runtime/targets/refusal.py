# SPDX-License-Identifier: Apache-2.0
"""Targets that transformers does not run here are refused by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts

NOT_RUN = {
    "kimi_k2": "a model that transformers has code for; this one's is its checkpoint's own, which is never run",
    "modelopt": "weights that transformers reads; it knows no ModelOpt checkpoint",
    "compressed-tensors": "weights that transformers reads; it needs the package compressed-tensors for these",
}
"""A model_type or quant_method that transformers 5.23 does not run here, and what was expected in its place."""


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a target that transformers does not run, with the runtime that does."""
    from transformers import CONFIG_MAPPING, __version__

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
