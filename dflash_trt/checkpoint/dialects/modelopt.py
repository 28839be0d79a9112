# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Model Optimizer's export (modelopt/torch/export/plugins/hf_spec_export.py, DFlashExporter).

z-lab's layout with model_type qwen3; a window is use_swa and swa_window_size in dflash_config, while layer_types are
full_attention. NVIDIA's own drafts (Nemotron-3.5) set has_embed_tokens and have the whole embedding.
"""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, Layout, refuse_unless, renamed, unrepresentable
from dflash_trt.checkpoint.dialects.shared_keys import section_keys
from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

WINDOW_KEYS = frozenset({"use_swa", "swa_window_size"})
OWN_KEYS = frozenset({"has_embed_tokens", "has_lm_head"})


def recognises(config: Facts) -> bool:
    """Whether it has modelopt's keys for windows or for its own embedding."""
    return bool(section_keys(config, "dflash_config") & WINDOW_KEYS) or bool(config.keys() & OWN_KEYS)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts; CheckpointError where dflash_query_causal contradicts their causality."""
    spec = zlab.read(config, weights)
    if "dflash_query_causal" in config and config.flag("dflash_query_causal") != spec.layers[0].causal:
        raise config.conflict(
            "dflash_query_causal", f"{str(spec.layers[0].causal).lower()}, the causality of the layers"
        )
    return spec


MODELOPT = Dialect(name="modelopt", recognises=recognises, read=read, is_canonical=True, canonical=zlab.canonical)


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json in the form of modelopt's exporter, with the additional keys of NVIDIA's own drafts."""
    refuse_unless("modelopt", spec, {fact: plain for fact, plain in zlab.PLAIN.items() if fact != "own_embedding"})
    sinks, windows = {layer.sinks for layer in spec.layers}, {layer.sliding_window for layer in spec.layers}
    causal = {layer.causal for layer in spec.layers}
    for fact, values in (("layers.sinks", sinks), ("sliding_window", windows), ("causal", causal)):
        if len(values) > 1:
            raise unrepresentable("modelopt", fact, "one value for all layers", sorted(values, key=str))
    layers = tuple(DraftLayer(sliding_window=None, causal=False) for _ in spec.layers)
    plain = msgspec.structs.replace(spec, layers=layers, own_embedding=False, model_type="qwen3")
    config = zlab.to_config(plain, dtype)
    dflash: dict[str, object] = {"causal": causal.pop(), "use_swa": windows != {None}}
    if (window := windows.pop()) is not None:
        dflash["swa_window_size"] = window
    if sinks.pop():
        dflash["attention_sink_bias"] = True
    if spec.own_embedding:
        config |= {"has_embed_tokens": True, "has_lm_head": False}
    section = config["dflash_config"]
    return config | {"dflash_config": {**(section if isinstance(section, dict) else {}), **dflash}}


def stored(weights: Weights) -> Weights:
    """Renames sinks as NVIDIA does."""
    return renamed(weights, lambda name: name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"))


LAYOUT = Layout(name="modelopt", to_config=to_config, stored=stored)
