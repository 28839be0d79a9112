# SPDX-License-Identifier: Apache-2.0
"""z-lab's checkpoints, from which most other dialects derive (github.com/z-lab/dflash, dflash/model.py), and the two
that add a few keys to them: JetSpec's and NVIDIA Model Optimizer's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dflash_trt.checkpoint.dialects.dialect import Dialect, refuse_unless, renamed, unrepresentable
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.dialects.shared_keys import (
    FULL,
    SLIDING,
    LayerType,
    Places,
    has_architecture,
    layer_types,
    layers,
    recognised_by,
    section_keys,
    windows_of,
)
from dflash_trt.checkpoint.draft_spec import DraftLayer, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.own_vocabulary import own_vocabulary, without_t2d
from dflash_trt.checkpoint.rope import spell_rope
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURES = (ARCHITECTURE, "Qwen3DFlashDraftModel")
"""NVIDIA NeMo AutoModel writes the second name."""
MODEL_TYPES = ("qwen3", "gpt_oss")
CODEBOOK = re.compile(r"^(candidate_selector\.\w+_codebook)\.weight$")
"""transformers' name of codebooks that are embeddings."""
ANCHOR = {"sample_from_anchor": False, "query_zero_predicts_next": False, "dspark_bonus_anchor": True}
"""Keys for whether row 0 of a block predicts; True marks keys with the opposite meaning (vLLM 0.33)."""
CAUSAL_HEAD = "causal_head"
"""Key of JetSpec (arXiv 2606.18394): z-lab's tensors and keys, trained with a causal block. Proposed as a chain, its
drafts are those of a causal DFlash draft."""
WINDOW_KEYS, OWN_KEYS = ("use_swa", "swa_window_size"), ("has_embed_tokens", "has_lm_head")
"""Keys of NVIDIA Model Optimizer's export (modelopt/torch/export/plugins/hf_spec_export.py, DFlashExporter), whose
layer_types are all full_attention. NVIDIA's own drafts (Nemotron-3.5) have the whole embedding."""
SAME_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias",
    "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip
"""Facts whose keys are named like the fields of DraftSpec in every dialect."""
PLAIN: dict[str, object] = {
    "biases": (), "value_scale": 1, "tap_hidden_size": None, "tap_norms": False, "context_input_layernorm": False,
    "attention_gate": None, "own_embedding": False, "mask_embedding": False, "draft_vocab_size": None,
    "block_conv": None, "candidate_selector": None, "markov_head": None, "lilicorr": None, "sample_from_anchor": False,
}  # fmt: skip
"""Facts that z-lab's layout cannot express, with their values for its drafts."""
OPTIONAL: dict[str, object] = {
    "num_target_layers": None, "input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None,
}  # fmt: skip
"""Facts that are written only where they differ from these values."""


def recognises(config: Facts) -> bool:
    """Whether this is a DFlash draft at all; asked after all other dialects."""
    return has_architecture(config, *ARCHITECTURES) or bool(section_keys(config, SECTION))


def read(config: Facts, weights: Weights, *, causal: bool | None = None, from_anchor: bool = False) -> DraftSpec:
    """The facts of z-lab's layout; `from_anchor` is whether row 0 predicts if no key of ANCHOR tells.

    Causality is `causal` where the dialect gives it, else is_causal, else dflash_config.causal (modelopt, JetSpec),
    else sliding layers are causal and full ones are not (dflash/model.py, August 2026).
    """
    if not set(config.texts("architectures")) & set(ARCHITECTURES):
        raise config.error(
            "architectures", f"the name that its layout has, {ARCHITECTURE} in z-lab's",
            "give the config.json that was written with these weights",
        )  # fmt: skip
    places = Places(config)
    facts = places.read_facts()
    causal = read_causality(places) if causal is None else causal
    has_sinks = places.of("attention_sink_bias").flag("attention_sink_bias", default=False)
    cap = places.of("final_logit_softcapping")
    return DraftSpec(
        **facts,
        **own_vocabulary(config, weights, facts["vocab_size"]),
        model_type=config.text("model_type", choices=MODEL_TYPES),
        layers=layers(read_types(places), causal, has_sinks),
        sample_from_anchor=read_anchor(places, default=from_anchor),
        input_embedding_scale=places.of("input_embedding_scale").number("input_embedding_scale", default=1),
        output_multiplier=places.of("output_multiplier").number("output_multiplier", default=1),
        final_logit_softcapping=cap.optional("final_logit_softcapping", cap.number),
    )


def _read_jetspec(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts; causal_head is the causality of every layer, and other keys must agree."""
    dflash = config.section(SECTION)
    causal = dflash.flag(CAUSAL_HEAD)
    for place in (dflash, config):
        for key in ("causal", "is_causal"):
            if key in place and place.flag(key) != causal:
                raise place.error(key, f"{str(causal).lower()}, as dflash_config.{CAUSAL_HEAD} says")
    return read(config, weights, causal=causal)


def _read_modelopt(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts; CheckpointError where dflash_query_causal contradicts their causality."""
    spec = read(config, weights)
    if "dflash_query_causal" in config and config.flag("dflash_query_causal") != spec.layers[0].causal:
        raise config.conflict(
            "dflash_query_causal", f"{str(spec.layers[0].causal).lower()}, the causality of the layers"
        )
    return spec


def read_causality(places: Places) -> bool | None:
    """Causality of all layers, from is_causal or else dflash_config.causal; None without either."""
    place, otherwise = places.of("is_causal"), places.dflash.optional("causal", places.dflash.flag)
    return place.flag("is_causal") if "is_causal" in place else otherwise


def read_types(places: Places) -> list[LayerType]:
    """Types of the layers; with modelopt's use_swa all layers have the window if no layer type slides (vLLM 0.33)."""
    types, dflash = layer_types(places.config), places.dflash
    size = dflash.optional("swa_window_size", dflash.integer)
    if not dflash.flag("use_swa", default=False):
        return types
    if not (sliding := {each.window for each in types if each.slides}):
        return [LayerType(slides=False, window=dflash.integer("swa_window_size")) for _ in types]
    if size is not None and sliding != {size}:
        raise dflash.error("swa_window_size", "sliding_window, which the sliding layers have")
    return types


def read_anchor(places: Places, *, default: bool) -> bool:
    """Whether row j of a block predicts the token after its own position, so that S rows propose S tokens."""
    said: dict[str, bool] = {}
    for key, is_opposite in ANCHOR.items():
        if key in (place := places.of(key)):
            said[key] = place.flag(key) != is_opposite
    if len(set(said.values())) > 1:
        key = next(key for key, value in said.items() if value != next(iter(said.values())))
        raise places.of(key).error(key, f"what {next(iter(said))} says")
    return next(iter(said.values()), default)


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Renames sinks as gpt-oss's and codebooks as z-lab's, and leaves out t2d."""

    def name_of(name: str) -> str:
        return CODEBOOK.sub(r"\1", name.replace(".self_attn.attention_sink_bias", ".self_attn.sinks"))

    return renamed(without_t2d(weights, spec), name_of)


def follow_rule(layers: Sequence[DraftLayer]) -> bool:
    """Whether exactly the sliding layers are causal, the default without a key for causality."""
    return all(layer.causal == (layer.sliding_window is not None) for layer in layers)


def layers_problem(layers: Sequence[DraftLayer]) -> CheckpointError | None:
    """The error for windows, causality or sinks that this layout cannot express, if any."""
    windows = {layer.sliding_window for layer in layers} - {None}
    if any(layer.sinks for layer in layers):
        return unrepresentable("zlab", "layers.sinks", "no sinks", [layer.sinks for layer in layers])
    if len(windows) > 1:
        return unrepresentable("zlab", "sliding_window", "one window for all sliding layers", sorted(windows, key=str))
    if len({layer.causal for layer in layers}) > 1 and not follow_rule(layers):
        found = [layer.causal for layer in layers]
        return unrepresentable("zlab", "is_causal", "one causality for all layers, or causal where sliding", found)
    return None


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json in this layout, from which `read` returns `spec`; CheckpointError for what it cannot express."""
    refuse_unless("zlab", spec, PLAIN)
    if spec.model_type not in MODEL_TYPES:
        raise unrepresentable("zlab", "model_type", f"one of {', '.join(MODEL_TYPES)}", spec.model_type)
    if spec.vocab_size is None:
        raise unrepresentable("zlab", "vocab_size", "the size of the target's vocabulary", None)
    if problem := layers_problem(spec.layers):
        raise problem
    by_rule = follow_rule(spec.layers)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURE],
        "model_type": spec.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        **{key: getattr(spec, key) for key in SAME_KEYS},
        **spell_rope(spec.rope),
        "num_hidden_layers": spec.num_layers,
        "layer_types": [SLIDING if layer.sliding_window else FULL for layer in spec.layers],
        "sliding_window": next(iter(windows_of(spec)), None),
        "use_sliding_window": bool(windows_of(spec)),
        "tie_word_embeddings": False,
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)},
        **{key: getattr(spec, key) for key in OPTIONAL if getattr(spec, key) != OPTIONAL[key]},
    }
    if not by_rule:
        config["is_causal"] = spec.layers[0].causal
    return config


ZLAB = Dialect(name="zlab", recognises=recognises, read=read, is_canonical=True, canonical=canonical)
JETSPEC = Dialect(
    name="jetspec", recognises=recognised_by(section=(CAUSAL_HEAD,)), read=_read_jetspec, is_canonical=True
)
MODELOPT = Dialect(
    name="modelopt",
    recognises=recognised_by(section=WINDOW_KEYS, keys=OWN_KEYS),
    read=_read_modelopt,
    is_canonical=True,
    canonical=canonical,
)
