# SPDX-License-Identifier: Apache-2.0
"""z-lab's own checkpoints, of which most others are variations (github.com/z-lab/dflash, dflash/model.py).

Older files have block_size, mask_token_id and target_layer_ids at the top level, newer ones in dflash_config.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.checkpoint.dialects.dialect import (
    FULL,
    MAX_BLOCK_SIZE,
    SLIDING,
    Dialect,
    Places,
    layers,
    mask_token,
    read_backbone,
    says,
    section_keys,
    taps,
    unsayable,
    windows,
)
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.rope import spell_rope

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPES = ("qwen3", "gpt_oss")
# Both keep the order of logits, and proposals are the argmax: read as numbers > 0, and without effect.
ORDER_KEEPING_KEYS = ("final_logit_softcapping", "output_multiplier")
KEYS = frozenset(
    {
        "block_size", "causal", "input_embedding_scale", "is_causal", "mask_token_id", "target_layer_ids",
        *ORDER_KEEPING_KEYS,
    }
)  # fmt: skip

SAME_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias",
    "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip
"""Facts that every dialect calls as DraftSpec does."""
PLAIN: dict[str, object] = {
    "biases": (), "value_scale": 1, "tap_hidden_size": None, "tap_norms": False, "context_input_layernorm": False,
    "attention_gate": None, "own_embedding": False, "mask_embedding": False, "draft_vocab_size": None,
}  # fmt: skip
"""Facts for which z-lab's layout has no words, and what they are for every draft of it."""


def recognises(config: Facts) -> bool:
    """Whether this is a DFlash draft at all: the last of the dialects to be asked."""
    return says(config, "architectures", ARCHITECTURE) or bool(section_keys(config, "dflash_config"))


def read(config: Facts) -> DraftSpec:
    """The facts of a checkpoint in z-lab's layout."""
    return read_layout(config, KEYS, windows(config))


def read_layout(config: Facts, known: frozenset[str], windows: Sequence[int | None]) -> DraftSpec:
    """The facts of z-lab's layout: dflash_config has none but `known` keys, and `windows` says what layers see.

    Causality is by z-lab's rule: is_causal, else dflash_config.causal (modelopt, JetSpec), else sliding layers are
    causal and full ones are not (dflash/model.py, August 2026).
    """
    if ARCHITECTURE not in config.texts("architectures"):
        raise config.error("architectures", f"[{ARCHITECTURE!r}]")
    places = Places(config)
    dflash = places.dflash
    if unknown := sorted(dflash.keys() - known):
        raise dflash.error(unknown[0], f"only the keys {', '.join(sorted(known))}")
    for key in ORDER_KEEPING_KEYS:
        places.of(key).number(key, default=1)
    causal: bool | None = None
    if "is_causal" in (place := places.of("is_causal")):
        causal = place.flag("is_causal")
    elif "causal" in dflash:
        causal = dflash.flag("causal")
    vocab_size = config.integer("vocab_size")
    scale = places.of("input_embedding_scale")
    return DraftSpec(
        **read_backbone(config),
        model_type=config.text("model_type", choices=MODEL_TYPES),
        attention_bias=config.flag("attention_bias"),
        layers=layers(windows, causal),
        vocab_size=vocab_size,
        block_size=places.of("block_size").integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(places.of("mask_token_id"), vocab_size),
        target_layer_ids=taps(places.of("target_layer_ids")),
        num_target_layers=config.optional("num_target_layers", config.integer),
        input_embedding_scale=scale.number("input_embedding_scale", default=1),
    )


def spell(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json in this layout for `spec`, whose tensors are of torch's type `dtype`; `read` gives `spec` back.

    Raises CheckpointError, by name, for what the layout cannot say.
    """
    for fact, plain in PLAIN.items():
        if getattr(spec, fact) != plain:
            raise unsayable("zlab", fact, repr(plain), getattr(spec, fact))
    if any(layer.sinks for layer in spec.layers):
        raise unsayable("zlab", "layers.sinks", "no sinks", [layer.sinks for layer in spec.layers])
    windows = {layer.sliding_window for layer in spec.layers} - {None}
    causalities = {layer.causal for layer in spec.layers}
    by_rule = all(layer.causal == (layer.sliding_window is not None) for layer in spec.layers)
    if len(windows) > 1:
        raise unsayable("zlab", "sliding_window", "one window for all sliding layers", sorted(windows, key=str))
    if len(causalities) > 1 and not by_rule:
        found = [layer.causal for layer in spec.layers]
        raise unsayable("zlab", "is_causal", "one causality for all layers, or causal where sliding", found)
    config: dict[str, object] = {
        "architectures": [ARCHITECTURE],
        "model_type": spec.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        **{key: getattr(spec, key) for key in SAME_KEYS},
        **spell_rope(spec.rope),
        "num_hidden_layers": spec.num_layers,
        "layer_types": [SLIDING if layer.sliding_window else FULL for layer in spec.layers],
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)},
    }
    if not by_rule:
        config["is_causal"] = spec.layers[0].causal
    if spec.num_target_layers is not None:
        config["num_target_layers"] = spec.num_target_layers
    if spec.input_embedding_scale != 1:
        config["input_embedding_scale"] = spec.input_embedding_scale
    return config


ZLAB = Dialect(name="zlab", recognises=recognises, read=read, is_canonical=True)
