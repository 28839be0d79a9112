# SPDX-License-Identifier: Apache-2.0
"""Writes z-lab's layout, with the keys that DFlash2 and LiLiCorr add to it."""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, lilicorr, zlab
from dflash_trt.checkpoint.dialects.dialect import Layout
from dflash_trt.checkpoint.draft_spec import DraftSpec

ADDED: dict[str, object] = {"block_conv": None, "candidate_selector": None, "lilicorr": None}


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json in z-lab's layout; `dtype` is torch's. CheckpointError for what the layout cannot say."""
    if all(getattr(spec, name) == value for name, value in ADDED.items()):
        return zlab.to_config(spec, dtype)
    if spec.lilicorr is not None:
        architecture, additions = lilicorr.ARCHITECTURE, lilicorr.additions_to_config(spec)
    else:
        architecture, additions = dflash2.ARCHITECTURES[0], dflash2.additions_to_config(spec, "zlab")
    config = zlab.to_config(msgspec.structs.replace(spec, **ADDED), dtype)
    section = config["dflash_config"]
    assert isinstance(section, dict)
    section |= additions
    return config | {"architectures": [architecture]}


LAYOUT = Layout(name="zlab", to_config=to_config)
