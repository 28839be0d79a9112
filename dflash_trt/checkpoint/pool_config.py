# SPDX-License-Identifier: Apache-2.0
"""config.json of an engine directory, by which TensorRT-LLM sizes the pool of the draft's context.

Layers with windows of their own would get several pools, the pages of one window for all would be recycled while the
worker goes on reading them, and a window that is not mentioned is inherited from the target (`_create_one_model_draft_
kv_cache_manager` of pyexecutor/_util.py @ 12a71fe4). The graphs have the windows; for readers of the draft they stand
under a key of their own.
"""

from __future__ import annotations

from dflash_trt.checkpoint.facts import Facts

CHECKPOINT = "dflash_trt_checkpoint"
"""What the replaced keys were."""


def for_pool(config: dict[str, object], num_layers: int) -> dict[str, object]:
    """`config` with one pool of BF16 for all layers."""
    pool = {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * num_layers,
        "torch_dtype": "bfloat16",
    }
    return config | pool | {CHECKPOINT: {key: config[key] for key in pool if key in config}}


def as_checkpoint(config: Facts) -> Facts:
    """The draft's own facts, of a checkpoint or an engine directory."""
    values = config.values()
    if CHECKPOINT not in config:
        return config
    own = config.section(CHECKPOINT).values()
    replaced = for_pool({}, 0).keys()
    return Facts({key: value for key, value in values.items() if key not in replaced} | own, config.file)
