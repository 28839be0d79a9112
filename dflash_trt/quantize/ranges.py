# SPDX-License-Identifier: Apache-2.0
"""Activation ranges: what calibration measures and the converter turns into scales."""

from __future__ import annotations

import msgspec

CAPTURE = "dflash-trt capture DRAFT --target TARGET --prompts FILE -o features.safetensors"
"""What makes the features that ranges come from."""


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest magnitudes that a draft's activations reached on calibration features."""

    inputs: dict[str, float]
    """max |x| of each linear layer's input, by module name (`fc`, `layers.0.mlp.down_proj`, ...)."""
    k: tuple[float, ...]
    """max |K| of the context as the cache stores it (after norm and rotation), by layer."""
    v: tuple[float, ...]
    """max |V| of the context as the cache stores it, by layer."""
