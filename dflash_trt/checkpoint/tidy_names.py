# SPDX-License-Identifier: Apache-2.0
"""Removes from a draft's tensors what tools add: prefixes of all names, rotary caches, and an axis of scalar scales."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.safetensors_file import StoredTensor, Weights
from dflash_trt.errors import CheckpointError

PREFIXES = ("model.", "module.", "_orig_mod.", "draft_model.")
"""Prefixes of transformers' causal language models, DDP, torch.compile, and trainers that hold draft and target."""
OUTSIDE = {"lm_head.weight", "lm_head.bias", "d2t", "t2d"}
"""Tensors that a model with its backbone at `model.` holds beside it."""
ROTARY_CACHE = "rotary_emb.inv_freq"
SCALARS = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
INJECTION = ("fc.weight", "hidden_norm.weight")


def tidied(weights: Weights) -> tuple[Weights, str]:
    """The tensors without a prefix that all names have and without rotary caches, and that prefix, "" for none.

    Scales of one number have no axes.
    """
    weights = {name: _scalar(tensor) for name, tensor in weights.items() if not name.endswith(ROTARY_CACHE)}
    removed = ""
    while prefix := _common_prefix(weights):
        removed += prefix
        names = {name: name.removeprefix(prefix) for name in weights}
        weights = {new: msgspec.structs.replace(weights[name], name=new) for name, new in names.items()}
    return weights, removed


def refuse_plain_model(directory: Path, weights: Weights) -> None:
    """Raises CheckpointError for a draft without fc and hidden_norm, as tools save it that load it by its model_type.

    llm-compressor's oneshot (0.14) and transformers' AutoModel take a draft of model_type qwen3 for a Qwen3 model: they
    drop both and make up an embedding, without an error.
    """
    has_layers = any(name.startswith("layers.") for name in weights)
    if has_layers and "embed_tokens.weight" in weights and not any(name.endswith(INJECTION) for name in weights):
        raise CheckpointError(
            f"{directory} has layers and an embedding, but neither fc nor hidden_norm: it was saved as the plain model"
            " that model_type names",
            hint="llm-compressor's oneshot and transformers' AutoModel do that to a draft; quantise the original with"
            " dflash-trt quantize",
        )


def _scalar(tensor: StoredTensor) -> StoredTensor:
    is_scale = tensor.name.rpartition(".")[2] in SCALARS and tensor.dtype == "F32"
    return msgspec.structs.replace(tensor, shape=()) if is_scale and tensor.shape == (1,) else tensor


def _common_prefix(weights: Weights) -> str:
    names = weights.keys() - OUTSIDE
    found = (prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names))
    prefix = next(found, "")
    return prefix if not OUTSIDE & {name.removeprefix(prefix) for name in names} & weights.keys() else ""
