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
from dflash_trt.checkpoint.draft_spec import D2T, EMBEDDING, HEAD, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.errors import CheckpointError

KEY = "speculators_model_type"
T2D = "t2d"
TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that only the training loss reads; the library itself leaves them out on save."""


def recognises(config: Facts) -> bool:
    """Whether the file is Speculators'."""
    return KEY in config


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Speculators checkpoint; its tensors say whether embedding and lm_head are its own."""
    config.text(KEY, choices=("dflash",))
    backbone = config.section("transformer_layer_config")
    if config.flag("sample_from_anchor", default=False):
        raise config.error(
            "sample_from_anchor", "false (a draft that also predicts from the block's first slot is DSpark's)"
        )
    vocab_size, rows = backbone.integer("vocab_size"), config.integer("draft_vocab_size")
    if rows > vocab_size:
        raise config.error("draft_vocab_size", f"at most transformer_layer_config.vocab_size {vocab_size}")
    tap_width = config.optional("target_hidden_size", config.integer)
    causal_where_sliding = not config.flag("sliding_window_non_causal", default=False)
    return DraftSpec(
        **read_backbone(backbone),
        model_type=backbone.text("model_type", choices=("qwen3",)),
        attention_bias=backbone.flag("attention_bias"),
        layers=layers(windows(backbone), None if causal_where_sliding else False),
        vocab_size=vocab_size,
        block_size=config.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(config, vocab_size),
        target_layer_ids=taps(config, "aux_hidden_state_layer_ids", first=1),
        num_target_layers=None,
        input_embedding_scale=1,
        tap_hidden_size=None if tap_width == backbone.integer("hidden_size") else tap_width,
        own_embedding=EMBEDDING in weights,
        draft_vocab_size=rows if rows != vocab_size or f"{HEAD}.weight" in weights else None,
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Without what only training reads, and without t2d, which says the same as d2t."""
    left = {name: tensor for name, tensor in weights.items() if name not in TRAINING_ONLY}
    if spec.has_d2t and T2D in left and D2T in left:
        _check_t2d(left.pop(T2D), left[D2T], spec)
    return left


def _check_t2d(t2d: Tensor, d2t: Tensor, spec: DraftSpec) -> None:
    """Raises CheckpointError unless t2d marks the tokens that d2t names; d2t itself is checked with all tensors."""
    if (t2d.dtype, t2d.shape) != ("BOOL", (spec.vocab_size,)):
        raise CheckpointError(
            f"{t2d.file}: tensor {T2D!r}: expected BOOL {[spec.vocab_size]}, found {t2d.dtype} {list(t2d.shape)}"
        )
    if (d2t.dtype, d2t.shape) != ("I64", (spec.draft_vocab_size,)):
        return
    import numpy as np

    marked = np.memmap(t2d.file, "u1", mode="r", offset=t2d.offset, shape=t2d.shape)
    offsets = np.memmap(d2t.file, "<i8", mode="r", offset=d2t.offset, shape=d2t.shape)
    named = np.sort(offsets + np.arange(len(offsets)))
    if not np.array_equal(np.flatnonzero(marked), named):
        raise CheckpointError(
            f"{t2d.file}: tensor {T2D!r}: expected the {len(named)} tokens that d2t names, found"
            f" {int(np.count_nonzero(marked))}, and not just these"
        )


SPECULATORS = Dialect(name="speculators", recognises=recognises, read=read, is_canonical=False, canonical=canonical)
