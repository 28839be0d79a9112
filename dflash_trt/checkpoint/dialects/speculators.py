# SPDX-License-Identifier: Apache-2.0
"""vLLM's Speculators library (github.com/vllm-project/speculators 0.9, speculators/models/dflash).

The backbone's facts stand in transformer_layer_config, a Qwen3Config; tap i of z-lab is i + 1 here. Sliding layers are
causal unless sliding_window_non_causal says otherwise (create_anchor_block_mask_mod), which is true for dflash2. vLLM
0.33 takes the key for all layers, full ones included, and leaves it out for dspark (update_dflash in algos.py).
"""

from __future__ import annotations

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, dspark, zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.shared_keys import (
    MAX_BLOCK_SIZE,
    layer_types,
    layers,
    mask_token,
    read_backbone,
    recognised_by,
    taps,
)
from dflash_trt.checkpoint.draft_spec import EMBEDDING, HEAD, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

KEY = "speculators_model_type"
DFLASH: dict[str, object] = {
    "block_size": 8, "draft_vocab_size": 32000, "sample_from_anchor": False, "sliding_window_non_causal": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, object]] = {
    "dflash": DFLASH,
    "dflash2": DFLASH | {
        "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16,
        "sliding_window_non_causal": True,
    },
    "dspark": DFLASH | {
        "confidence_head_with_markov": True, "enable_confidence_head": True, "markov_head_type": "vanilla",
        "markov_rank": 256, "sample_from_anchor": True,
    },
}  # fmt: skip
"""Values of keys that a file may leave out, by algorithm: those of the library's configuration classes."""
TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that only the training loss reads; the library itself leaves them out on save."""


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Speculators checkpoint; it has its own embedding and lm_head if there are such tensors."""
    algorithm = config.text(KEY, choices=tuple(DEFAULTS))
    is_dflash2, is_dspark = algorithm == "dflash2", algorithm == "dspark"
    config = config.replaced(**defaults(config))
    backbone = config.section("transformer_layer_config")
    from_anchor = config.flag("sample_from_anchor")
    if from_anchor and is_dflash2:
        raise config.error("sample_from_anchor", "false in a DFlash2 draft, whose selector begins after the anchor")
    vocab_size, rows = backbone.integer("vocab_size"), config.integer("draft_vocab_size")
    if rows > vocab_size:
        raise config.conflict("draft_vocab_size", f"at most transformer_layer_config.vocab_size {vocab_size}")
    tap_width = config.optional("target_hidden_size", config.integer)
    causal_where_sliding = not config.flag("sliding_window_non_causal")
    if is_dflash2 and rows != vocab_size:
        raise config.conflict("draft_vocab_size", f"transformer_layer_config.vocab_size {vocab_size}")
    if "model_type" in backbone:  # sizes only: the layers are always Qwen3's
        backbone.text("model_type", choices=("qwen3", "llama"))
    spec = DraftSpec(
        **read_backbone(backbone),
        model_type="qwen3",
        attention_bias=backbone.flag("attention_bias"),
        layers=layers(layer_types(backbone), None if causal_where_sliding else False),
        vocab_size=vocab_size,
        block_size=config.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(config, vocab_size),
        target_layer_ids=taps(config, "aux_hidden_state_layer_ids", first=1),
        num_target_layers=config.optional("num_target_layers", config.integer),
        input_embedding_scale=1,
        tap_hidden_size=None if tap_width == backbone.integer("hidden_size") else tap_width,
        own_embedding=EMBEDDING in weights,
        sample_from_anchor=from_anchor,
        draft_vocab_size=rows if rows != vocab_size or f"{HEAD}.weight" in weights else None,
    )
    if is_dspark:
        return dspark.with_head(spec, dspark.read_head(lambda _: config))
    if not is_dflash2:
        return spec
    return msgspec.structs.replace(spec, **dflash2.read_additions(lambda _: config, spec.hidden_size, vocab_size))


def defaults(config: Facts) -> dict[str, object]:
    """The keys that a Speculators file leaves out, with the library's values; empty for files of other dialects."""
    values = DEFAULTS.get(str(config.values().get(KEY)), {})
    return {key: value for key, value in values.items() if key not in config}


def disagreement(config: Facts, spec: DraftSpec) -> str | None:
    """Why vLLM 0.33 computes a Speculators draft differently, if it does."""
    algorithm = config.values().get(KEY)
    if algorithm == "dspark" and "sample_from_anchor" not in config:
        return "vLLM 0.33 takes sample_from_anchor for false where it is left out, speculators 0.9 for true: write it"
    if algorithm not in ("dflash", "dflash2"):
        return None
    theirs = config.holds("sliding_window_non_causal", value=False)
    if all(layer.causal == theirs for layer in spec.layers):
        return None
    return (
        f"vLLM 0.33 computes all layers {'causal' if theirs else 'not causal'}: sliding_window_non_causal, "
        f"{'false' if theirs else 'true where it is left out'}, holds for full layers, too, and drafts get worse"
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Renames tensors as z-lab's and leaves out those of training."""
    return zlab.canonical({name: tensor for name, tensor in weights.items() if name not in TRAINING_ONLY}, spec)


SPECULATORS = Dialect(
    name="speculators", recognises=recognised_by(keys=(KEY,)), read=read, is_canonical=False, canonical=canonical
)
