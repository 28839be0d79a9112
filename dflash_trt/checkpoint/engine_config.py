# SPDX-License-Identifier: Apache-2.0
"""config.json of an engine directory: the draft's, with the context cache as TensorRT-LLM is to size it."""

from __future__ import annotations

from dflash_trt.checkpoint.facts import Facts

REPLACED = "dflash_trt_checkpoint"
"""Key of an engine's config.json that holds the values `for_pool` replaced."""


def for_pool(config: dict[str, object], num_layers: int) -> dict[str, object]:
    """config.json of an engine: `config` with one pool of BF16 for all layers, by which TensorRT-LLM sizes it.

    Layers with windows of their own would get several pools, the pages of one window for all would be recycled while
    the worker goes on reading them, and a window that is not mentioned is inherited from the target
    (`_create_one_model_draft_kv_cache_manager` of pyexecutor/_util.py @ 12a71fe4). The graphs have the windows; for
    readers of the draft they stand under a key of their own.
    """
    pool = {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * num_layers,
        "torch_dtype": "bfloat16",
    }
    return config | pool | {REPLACED: {key: config[key] for key in pool if key in config}}


def as_checkpoint(config: Facts) -> Facts:
    """The draft's own facts, of a checkpoint or an engine directory."""
    if REPLACED not in config:
        return Facts(config.values(), config.file)  # with nothing read so far
    kept = {key: value for key, value in config.values().items() if key not in for_pool({}, 0)}
    return Facts(kept | config.section(REPLACED).values(), config.file)
