# SPDX-License-Identifier: Apache-2.0
"""Windows and causality of a draft's layers, from layer_types, sliding_window and is_causal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_trt.checkpoint.dialects.shared_keys import MAX_LAYERS
from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerType(NamedTuple):
    """A layer's entry in layer_types, with its window."""

    slides: bool
    window: int | None
    """None where the layer is full, or windows are switched off."""


def layer_types(config: Facts) -> list[LayerType]:
    """Each layer's type; without layer_types every layer is full.

    use_sliding_window false switches windows off, but not the causality of sliding layers (transformers 5.24,
    Qwen3Config; z-lab's dflash 0.1.0).
    """
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if "layer_types" not in config and config.flag("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "layer_types, which say where the window applies")
    types = config.texts("layer_types") if "layer_types" in config else (FULL,) * num_layers
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise config.error("layer_types", f"{num_layers} times {FULL} or {SLIDING}")
    has_windows = config.flag("use_sliding_window", default=True) and SLIDING in types
    window = config.integer("sliding_window") if has_windows else None
    return [LayerType(kind == SLIDING, window if kind == SLIDING else None) for kind in types]


def layers(
    types: Sequence[LayerType], causal: bool | None, sinks: Sequence[bool] | bool = False
) -> tuple[DraftLayer, ...]:
    """Window, causality and sinks by layer; `causal` None: sliding layers are causal, full ones are not."""
    have = [sinks] * len(types) if isinstance(sinks, bool) else sinks
    return tuple(
        DraftLayer(sliding_window=each.window, causal=each.slides if causal is None else causal, sinks=has_sinks)
        for each, has_sinks in zip(types, have, strict=True)
    )


def windows_of(spec: DraftSpec) -> set[int]:
    """The different windows of the layers of `spec`."""
    return {layer.sliding_window for layer in spec.layers if layer.sliding_window is not None}
