# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Model Optimizer's export (modelopt/torch/export/plugins/hf_spec_export.py, DFlashExporter).

z-lab's layout with model_type qwen3 whatever the target is. Without a window it is z-lab's to the letter, and read
as that; a window is spelled use_swa and swa_window_size in dflash_config, while layer_types stay full_attention.
"""

from __future__ import annotations

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, section_keys, windows
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts

WINDOW_KEYS = frozenset({"use_swa", "swa_window_size"})


def recognises(config: Facts) -> bool:
    """Whether dflash_config speaks of windows in modelopt's words."""
    return bool(section_keys(config, "dflash_config") & WINDOW_KEYS)


def read(config: Facts) -> DraftSpec:
    """z-lab's facts, with one window for all layers where use_swa says so."""
    dflash, found = config.section("dflash_config"), windows(config)
    if dflash.flag("use_swa", default=False):
        found = [dflash.integer("swa_window_size")] * len(found)
    return zlab.read_layout(config, zlab.KEYS | WINDOW_KEYS, found)


MODELOPT = Dialect(name="modelopt", recognises=recognises, read=read, is_canonical=True)
