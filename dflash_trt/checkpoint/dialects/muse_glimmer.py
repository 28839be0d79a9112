# SPDX-License-Identifier: Apache-2.0
"""Meta's draft of Muse-Glimmer, in transformers' layout (5.23, models/muse_glimmer_assistant).

fc and hidden_norm are in an encoder; other tensors have z-lab's names. No layer is causal, and windows are inclusive:
create_bidirectional_sliding_window_mask keeps |q - k| <= sliding_window.
"""

from __future__ import annotations

from dflash_trt.checkpoint.dialects.dialect import Dialect, renamed
from dflash_trt.checkpoint.dialects.shared_keys import (
    MAX_BLOCK_SIZE,
    layer_types,
    layers,
    read_backbone,
    recognised_by,
    taps,
)
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Muse-Glimmer draft, without the size of the target's vocabulary if the file lacks it."""
    config.text("model_type", choices=(MODEL_TYPE,))
    types = layer_types(config)
    inclusive = [each if each.window is None else each._replace(window=each.window + 1) for each in types]
    if config.flag("is_causal", default=False):
        raise config.error("is_causal", "false, as transformers computes it")
    return DraftSpec(
        **read_backbone(config),
        model_type=MODEL_TYPE,
        attention_bias=False,
        layers=layers(inclusive, causal=False),
        vocab_size=config.optional("vocab_size", config.integer),
        block_size=config.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=config.integer("mask_token_id", minimum=0),
        target_layer_ids=taps(config),
        num_target_layers=None,
        input_embedding_scale=1,
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Renames fc and hidden_norm as z-lab's."""
    return renamed(weights, lambda name: NAMES.get(name, name))


MUSE_GLIMMER = Dialect(
    name="muse_glimmer",
    recognises=recognised_by(architectures=(ARCHITECTURE,), values={"model_type": MODEL_TYPE}),
    read=read,
    is_canonical=False,
    canonical=canonical,
)
