# SPDX-License-Identifier: Apache-2.0
"""config.json of an engine directory: the draft's, changed so that TensorRT-LLM allocates one context pool."""

from __future__ import annotations

from dflash_trt.checkpoint.facts import Facts

REPLACED = "dflash_trt_checkpoint"
"""Key of an engine's config.json with the values that `for_pool` replaced."""


def for_pool(config: dict[str, object], num_layers: int) -> dict[str, object]:
    """config.json of an engine: `config` with one BF16 pool for all layers, which TensorRT-LLM allocates.

    With different windows TensorRT-LLM would allocate several pools; with one window for all it would recycle pages
    that the worker still reads; without a window it would inherit the target's
    (`_create_one_model_draft_kv_cache_manager` of pyexecutor/_util.py @ 12a71fe4). The graphs contain the windows, and
    readers of the draft find them at REPLACED.
    """
    pool = {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * num_layers,
        "torch_dtype": "bfloat16",
    }
    return config | pool | {REPLACED: {key: config[key] for key in pool if key in config}}


def as_checkpoint(config: Facts) -> Facts:
    """The draft's own facts, from the config.json of a checkpoint or of an engine directory."""
    if REPLACED not in config:
        return Facts(config.values(), config.file)  # with nothing read so far
    kept = {key: value for key, value in config.values().items() if key not in for_pool({}, 0)}
    return Facts(kept | config.section(REPLACED).values(), config.file)
