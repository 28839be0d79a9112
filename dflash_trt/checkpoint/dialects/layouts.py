# SPDX-License-Identifier: Apache-2.0
"""Writes drafts for other tools: in the layouts of z-lab, of vLLM's Speculators (0.9) and of Model Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, dspark, lilicorr, zlab
from dflash_trt.checkpoint.dialects.dialect import refuse_unless, renamed, unrepresentable
from dflash_trt.checkpoint.dialects.shared_keys import LayerType, layers, windows_of
from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.safetensors_file import Weights

ADDED: dict[str, object] = {"block_conv": None, "candidate_selector": None, "lilicorr": None}
"""Facts of DFlash2 and LiLiCorr, which z-lab's files have at keys of their own, with the values of plain drafts."""
VERSION = "0.9.0"
DEFAULTS = zlab.PLAIN | zlab.OPTIONAL
EXPRESSED = {
    fact: DEFAULTS[fact]
    for fact in (
        "own_embedding", "draft_vocab_size", "block_conv", "candidate_selector", "num_target_layers", "markov_head",
        "sample_from_anchor",
    )
}  # fmt: skip
"""Facts that the library expresses outside of the backbone, with z-lab's values."""
PLAIN = {fact: plain for fact, plain in DEFAULTS.items() if fact not in EXPRESSED}
"""Facts that the library cannot express, with their values for its drafts."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a draft is written in a dialect that other tools read."""

    name: str
    to_config: Callable[[DraftSpec, str], dict[str, object]]
    """config.json from facts and torch's name of the dtype; raises CheckpointError for what it cannot represent."""
    stored: Callable[[Weights], Weights] = lambda weights: weights
    """Canonical tensors by the layout's names."""
    holds_quantised: bool = True
    """Whether readers of the layout support modelopt's quantised tensors."""


def zlab_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
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


def speculators_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json as speculators 0.9 writes it, but for the verifier's name; num_target_layers is ours."""
    refuse_unless("speculators", spec, PLAIN)
    windows, sinks, rope = windows_of(spec), [layer.sinks for layer in spec.layers], spec.rope
    for fact, expected, found, is_represented in (
        ("sliding_window", "one window for all sliding layers", sorted(windows), len(windows) <= 1),
        ("layers.sinks", "no sinks", sinks, not any(sinks)),
        ("partial_rotary_factor", "1", rope.partial_rotary_factor, rope.partial_rotary_factor == 1),
        ("rope.interleaved", "False", rope.interleaved, not rope.interleaved),
    ):
        if not is_represented:
            raise unrepresentable("speculators", fact, expected, found)
    _refuse_causality(spec)
    types = [LayerType(layer.sliding_window is not None, layer.sliding_window) for layer in spec.layers]
    plain = msgspec.structs.replace(spec, model_type="qwen3", layers=layers(types, None), **EXPRESSED)
    backbone = zlab.to_config(plain, dtype)
    for key in ("architectures", "block_size", "dflash_config"):
        del backbone[key]
    algorithm, architecture, more = "dflash", zlab.ARCHITECTURE, dict[str, object]()
    if spec.block_conv is not None or spec.candidate_selector is not None:
        algorithm, architecture = "dflash2", dflash2.ARCHITECTURES[0]
        more = dflash2.additions_to_config(spec, "speculators")
    elif spec.is_dspark:
        algorithm, architecture, more = "dspark", dspark.ARCHITECTURES[1], dspark.head_to_config(spec.markov_head)
    count = {} if spec.num_target_layers is None else {"num_target_layers": spec.num_target_layers}
    return {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "dtype": dtype,
        "mask_token_id": spec.mask_token_id,
        **count,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": not any(layer.causal for layer in spec.layers),
        **more,
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "transformer_layer_config": backbone,
    }


def _refuse_causality(spec: DraftSpec) -> None:
    """Raises CheckpointError where the library, or vLLM 0.33, would compute another causality than that of `spec`."""
    found = [layer.causal for layer in spec.layers]
    if spec.is_dspark:
        if not zlab.follow_rule(spec.layers):
            raise unrepresentable("speculators", "causal", "sliding layers causal and full ones not, in DSpark", found)
    elif len(set(found)) > 1 or any(layer.causal for layer in spec.layers if layer.sliding_window is None):
        raise unrepresentable("speculators", "causal", "one value for all layers, true only if all slide", found)


def name_verifier(config: dict[str, object], name: str, architectures: Sequence[str]) -> dict[str, object]:
    """`config` with the target, which Speculators' readers load as the verifier of this draft."""
    block_size = config["block_size"]
    assert isinstance(block_size, int)
    num_draft_tokens = block_size if config["sample_from_anchor"] else block_size - 1
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    return config | {
        "speculators_config": {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": list(architectures)},
        }
    }


def modelopt_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json in the form of modelopt's exporter, with the additional keys of NVIDIA's own drafts."""
    refuse_unless("modelopt", spec, {fact: plain for fact, plain in zlab.PLAIN.items() if fact != "own_embedding"})
    sinks, windows = {layer.sinks for layer in spec.layers}, {layer.sliding_window for layer in spec.layers}
    causal = {layer.causal for layer in spec.layers}
    for fact, values in (("layers.sinks", sinks), ("sliding_window", windows), ("causal", causal)):
        if len(values) > 1:
            raise unrepresentable("modelopt", fact, "one value for all layers", sorted(values, key=str))
    plain_layers = tuple(DraftLayer(sliding_window=None, causal=False) for _ in spec.layers)
    plain = msgspec.structs.replace(spec, layers=plain_layers, own_embedding=False, model_type="qwen3")
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


def _with_sinks(weights: Weights) -> Weights:
    """Renames sinks as NVIDIA does."""
    return renamed(weights, lambda name: name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="zlab", to_config=zlab_config),
        Layout(name="speculators", to_config=speculators_config, holds_quantised=False),
        Layout(name="modelopt", to_config=modelopt_config, stored=_with_sinks),
    )
}
