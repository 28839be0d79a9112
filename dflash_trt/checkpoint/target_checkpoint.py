# SPDX-License-Identifier: Apache-2.0
"""The target checkpoint: the facts that a drafter depends on, and the input embedding."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects.recognise import is_draft, read_config
from dflash_trt.checkpoint.dialects.refused import refuse_stranger
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import read_headers
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
"""Keys for the number of residual streams: DeepSeek V4, GLM-5.3 and HY 4; Qwen4-Exp; Gemma 3n."""
EMBEDDINGS = (
    *("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight"),
    *("tok_embeddings.weight", "tokens_embed.weight", "embed.weight", "w.weight"),
)
"""Names of input embeddings in checkpoints; a test asks every causal language model that transformers has."""
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
"""Keys for the number of MTP layers (vllm/config/speculative.py of vLLM 0.33.0, hf_config_override)."""
MAX_LAYERS = 4096  # far beyond any target; transformers would build each of them


class PartialTargetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The known facts of a target model: all of them (`TargetSpec`), or the published ones; None is unknown."""

    model_type: str | None = None
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int | None = None
    num_residual_streams: int | None = None
    """Parallel residual streams between layers, each of width `hidden_size`."""


class TargetSpec(PartialTargetSpec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All facts of a target that its drafter depends on: the same fields, fewer of them optional."""

    model_type: str
    max_position_embeddings: int
    num_residual_streams: int = 1


class TargetCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A target checkpoint whose facts and embedding agree."""

    directory: Path
    spec: TargetSpec
    config: Facts
    """Configuration of the language model: config.json, or its text_config."""
    weights: dict[str, StoredTensor]
    num_mtp_layers: int = 0
    """Multi-token-prediction layers; 0 where the files hold no tensor of one, as after some quantisers."""


def read_target(directory: Path, config: Facts | None = None) -> TargetCheckpoint:
    """Reads a causal language model's config.json, or takes it as `config`, and its weight headers.

    Raises CheckpointError for a draft, for a fact that is missing, and for an embedding table of another shape.
    """
    config = config or read_config(directory)
    spec, text = read_target_spec(config)
    if (weights := read_headers(directory)) is None:
        weights = read_weights(directory)
    input_embedding(directory, spec, weights)
    marks = ("mtp", "nextn", f"layers.{spec.num_hidden_layers}.")
    is_stored = any(mark in name for name in weights for mark in marks)
    mtp_layers = num_mtp_layers(text, config) if is_stored else 0
    return TargetCheckpoint(directory=directory, spec=spec, config=text, weights=weights, num_mtp_layers=mtp_layers)


def read_target_spec(config: Facts) -> tuple[TargetSpec, Facts]:
    """Facts of a target's config.json, and the part of it that describes the language model.

    Raises CheckpointError for a draft, and for a fact that is missing.
    """
    refuse_stranger(config)
    if is_draft(config):
        hint = "give --target the model that the draft was trained for"
        raise CheckpointError(f"{config.file.parent} is a DFlash draft, not a target", hint=hint)
    text = config.section("text_config") if "text_config" in config else config
    spec = TargetSpec(
        model_type=config.text("model_type"),
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=_num_hidden_layers(text),
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        num_residual_streams=next((n for key in STREAMS if (n := text.optional(key, text.integer))), 1),
    )
    return spec, text


def num_mtp_layers(*configs: Facts) -> int:
    """Multi-token-prediction layers by the first of `configs` that counts them; 0 where none does."""
    counted = [config.integer(key, minimum=0) for config in configs for key in MTP_LAYERS if key in config]
    return counted[0] if counted else 0


def _num_hidden_layers(text: Facts) -> int:
    """Number of decoder layers; for Nemotron-H transformers 5 writes a list of layers instead."""
    if "num_hidden_layers" not in text and "layers_block_type" in text:
        return len(text.texts("layers_block_type"))
    return text.integer("num_hidden_layers", maximum=MAX_LAYERS)


def input_embedding(directory: Path, spec: TargetSpec, weights: dict[str, StoredTensor]) -> StoredTensor:
    """The input embedding [V, H], found by the names that transformers' models give it.

    Raises CheckpointError where none has such a name, several could be it, or it has another shape.
    """
    shape = spec.vocab_size, spec.hidden_size
    named = [
        found for name in EMBEDDINGS if (found := [t for own, t in weights.items() if f".{own}".endswith(f".{name}")])
    ]
    tables = named[0] if named else []
    if len(tables) > 1:  # an audio or vision model has one, too
        tables = [table for table in tables if table.shape == shape] or tables
    if len(tables) != 1:
        names, known = ", ".join(table.name for table in tables), ", ".join(f"*{name}" for name in EMBEDDINGS)
        raise CheckpointError(f"{directory}: expected one input embedding, named {known}; found {names or 'none'}")
    if tables[0].shape != shape:
        raise tables[0].error(f"shape {list(shape)}", str(list(tables[0].shape)))
    return tables[0]
