# SPDX-License-Identifier: Apache-2.0
"""The language model inside a multimodal one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from dflash_trt.errors import CheckpointError


def text_model(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """`model` itself, or transformers' text-only class around its language model and lm_head; the rest is dropped.

    A multimodal model asks for more on the way: Gemma 4's for the kinds of its tokens, Kimi K2.5's for images. Where
    transformers has no text-only class, the whole model runs. CheckpointError where that class holds weights that the
    model does not.
    """
    config = model.config.get_text_config()
    if config is model.config:
        return model
    inner = getattr(model.base_model, "language_model", None)
    if inner is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return model
    with torch.device("meta"):
        text: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    setattr(text, text.base_model_prefix, inner)
    text.set_output_embeddings(model.get_output_embeddings())
    if missing := [name for name, tensor in text.named_parameters() if tensor.is_meta]:
        raise CheckpointError(
            f"{directory}: model_type: expected a model with all of a {config.model_type}, found"
            f" {model.config.model_type} without {missing[0]}"
        )
    text.generation_config = model.generation_config
    text.name_or_path = model.name_or_path
    return text
