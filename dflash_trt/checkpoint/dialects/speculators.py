# SPDX-License-Identifier: Apache-2.0
"""vLLM's Speculators library (github.com/vllm-project/speculators 0.9, speculators/models/dflash).

The backbone's facts stand in transformer_layer_config, a Qwen3Config. Taps are numbered by the layer that they enter,
so that tap i of z-lab is i + 1 here. Full layers never are causal; sliding layers are, unless
sliding_window_non_causal says otherwise (create_anchor_block_mask_mod).
"""

from __future__ import annotations

from dflash_trt.checkpoint.dialects.dialect import (
    MAX_BLOCK_SIZE,
    Dialect,
    Weights,
    layers,
    mask_token,
    read_backbone,
    taps,
    windows,
)
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError

KEY = "speculators_model_type"
TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that only the training loss reads; the library itself leaves them out on save."""


def recognises(config: Facts) -> bool:
    """Whether the file is Speculators'."""
    return KEY in config


def read(config: Facts) -> DraftSpec:
    """The facts of a Speculators checkpoint."""
    config.text(KEY, choices=("dflash",))
    backbone_config = config.section("transformer_layer_config")
    if config.flag("sample_from_anchor", default=False):
        raise config.error(
            "sample_from_anchor", "false (a draft that also predicts from the block's first slot is DSpark's)"
        )
    hidden_size = backbone_config.integer("hidden_size")
    if config.optional("target_hidden_size", config.integer) not in (None, hidden_size):
        raise config.error("target_hidden_size", f"transformer_layer_config.hidden_size {hidden_size}")
    vocab_size = backbone_config.integer("vocab_size")
    draft_vocab_size = config.integer("draft_vocab_size")
    if draft_vocab_size != vocab_size:
        raise config.error("draft_vocab_size", f"transformer_layer_config.vocab_size {vocab_size}")
    causal_where_sliding = not config.flag("sliding_window_non_causal", default=False)
    found = windows(backbone_config)
    return DraftSpec(
        **read_backbone(backbone_config),
        model_type=backbone_config.text("model_type", choices=("qwen3",)),
        attention_bias=backbone_config.flag("attention_bias"),
        layers=layers(found, None if causal_where_sliding else False),
        vocab_size=vocab_size,
        block_size=config.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(config, vocab_size),
        target_layer_ids=taps(config, "aux_hidden_state_layer_ids", first=1),
        num_target_layers=None,
        input_embedding_scale=1,
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Without what only training reads; an own embedding or lm_head is refused by name."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            raise CheckpointError(
                f"{weights[name].file}: tensor {name!r}: expected a draft that borrows the target's embedding and"
                " lm_head, found its own"
            )
    return {name: tensor for name, tensor in weights.items() if name not in TRAINING_ONLY}


SPECULATORS = Dialect(name="speculators", recognises=recognises, read=read, is_canonical=False, canonical=canonical)
