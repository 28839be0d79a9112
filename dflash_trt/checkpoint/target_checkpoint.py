# SPDX-License-Identifier: Apache-2.0
"""The target checkpoint: only the facts that a drafter depends on, and the check that a draft fits them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects.recognise import is_draft, read_config
from dflash_trt.checkpoint.dialects.refused import refuse_stranger
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights, read_headers
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

STREAMS = ("hc_mult", "hc_count", "altup_num_inputs")
"""Keys that say how many residual streams a target has: DeepSeek V4, GLM-5.3 and HY 4; Qwen4-Exp; Gemma 3n."""
EMBEDDINGS = (
    *("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight"),
    *("tok_embeddings.weight", "tokens_embed.weight", "embed.weight", "w.weight"),
)
"""Names of input embeddings in checkpoints; a test asks every causal language model that transformers has."""
AVERAGED = ("deepseek_v4", "glm5_next")
"""Targets of whose streams a tap of one stream's width is the mean: vLLM 0.33 (both), SGLang 0.5.23 (GLM-5.3)."""
MAX_LAYERS = 4096  # far beyond any target: transformers makes them one by one


class PartialTargetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a target model: all of it (`TargetSpec`), or what was published; None is not known."""

    model_type: str | None = None
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int | None = None
    num_residual_streams: int | None = None
    """Residual streams of `hidden_size` each that run beside each other from layer to layer."""


class TargetSpec(PartialTargetSpec, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The facts of a target model that its drafter depends on; narrows what may be unknown."""

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


def read_target(directory: Path, config: Facts | None = None) -> TargetCheckpoint:
    """Reads a causal language model's config.json, or takes it as `config`, and its weight headers.

    Raises CheckpointError for a draft, for a fact that is missing, and for an embedding table of another shape.
    """
    config = config or read_config(directory)
    spec, text = read_target_spec(config)
    if (weights := read_headers(directory)) is None:
        weights = read_weights(directory)
    input_embedding(directory, spec, weights)
    return TargetCheckpoint(directory=directory, spec=spec, config=text, weights=weights)


def read_target_spec(config: Facts) -> tuple[TargetSpec, Facts]:
    """Facts of a target's config.json, and the part of it that describes the language model.

    Raises CheckpointError for a draft, and for a fact that is missing.
    """
    refuse_stranger(config)
    if is_draft(config):
        hint = "give --target the model that the draft was trained for"
        raise CheckpointError(f"{config.file.parent}: expected a target, found a DFlash draft", hint=hint)
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


def _num_hidden_layers(text: Facts) -> int:
    """Number of decoder layers; transformers 5 writes Nemotron-H's as one entry for each layer only."""
    if "num_hidden_layers" not in text and "layers_block_type" in text:
        return len(text.texts("layers_block_type"))
    return text.integer("num_hidden_layers", maximum=MAX_LAYERS)


def input_embedding(directory: Path, spec: TargetSpec, weights: dict[str, StoredTensor]) -> StoredTensor:
    """The table [V, H] that the target looks its tokens up in, by the names that transformers' models give it.

    Raises CheckpointError where none has such a name, several could be it, or it has another shape.
    """
    shape = spec.vocab_size, spec.hidden_size
    named = [
        found for name in EMBEDDINGS if (found := [t for own, t in weights.items() if f".{own}".endswith(f".{name}")])
    ]
    tables = named[0] if named else []
    if len(tables) > 1:  # of an audio or vision model, too
        tables = [table for table in tables if table.shape == shape] or tables
    if len(tables) != 1:
        names, known = ", ".join(table.name for table in tables), ", ".join(f"*{name}" for name in EMBEDDINGS)
        raise CheckpointError(f"{directory}: expected one input embedding, named {known}; found {names or 'none'}")
    if tables[0].shape != shape:
        raise CheckpointError(
            f"{tables[0].file}: tensor {tables[0].name!r}: expected shape {list(shape)}, found {list(tables[0].shape)}"
        )
    return tables[0]


def check_pair(draft: PartialDraftSpec, target: PartialTargetSpec, *, draft_name: str, target_name: str) -> None:
    """Raises CheckpointError, with both values, where a draft does not fit a target, as far as facts are known."""

    def refuse(fact: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(
            f"{draft_name} does not fit target {target_name}: {fact}: expected {expected} (target),"
            f" found {found} (draft)",
            hint="give --target the model that this draft was trained for",
        )

    if draft.model_type == "gpt_oss" and target.model_type not in (None, "gpt_oss"):
        raise refuse("model_type", target.model_type, draft.model_type)
    _check_taps(draft.tap_hidden_size or draft.hidden_size, target, refuse)
    borrows = not draft.own_embedding or draft.draft_vocab_size is None
    if draft.hidden_size != target.hidden_size and borrows:
        raise refuse("hidden_size, as embedding and lm_head are the target's", target.hidden_size, draft.hidden_size)
    if draft.vocab_size not in (None, target.vocab_size):
        raise refuse("vocab_size", target.vocab_size, draft.vocab_size)
    if draft.mask_token_id is not None and draft.mask_token_id >= target.vocab_size:
        raise refuse("mask_token_id", f"a token id below {target.vocab_size}", draft.mask_token_id)
    if draft.num_target_layers not in (None, target.num_hidden_layers):
        raise refuse("num_target_layers", target.num_hidden_layers, draft.num_target_layers)
    if max(draft.target_layer_ids) >= target.num_hidden_layers:
        raise refuse("target_layer_ids", f"layers 0 to {target.num_hidden_layers - 1}", list(draft.target_layer_ids))


def _check_taps(
    width: int, target: PartialTargetSpec, refuse: Callable[[str, object, object], CheckpointError]
) -> None:
    """Raises CheckpointError where a tap of `width` values is not what the target's layers give, or may be anything."""
    streams = target.num_residual_streams
    if streams is None:
        if width % target.hidden_size:
            raise refuse("hidden_size", target.hidden_size, width)
    elif streams == 1 or width not in (target.hidden_size, streams * target.hidden_size):
        if width != target.hidden_size:
            raise refuse("hidden_size", target.hidden_size, width)
    elif width == target.hidden_size and target.model_type not in AVERAGED:
        raise refuse(
            f"width of a tap of {target.model_type}'s {streams} residual streams",
            f"all of them ({streams * target.hidden_size}): which one, or which mean, is not known",
            width,
        )


def read_pair(
    draft: str, target: str, find_target: Callable[[str], Path] = configuration_directory
) -> tuple[DraftCheckpoint, TargetCheckpoint]:
    """Reads both; raises CheckpointError where one is damaged, they do not fit, or each is in the other's place.

    Weights of repositories are fetched once it is known which is the draft.
    """
    directory = configuration_directory(draft)
    config = read_config(directory)
    partner = read_partner(target, draft, config, find_target)
    fetch_weights(directory)
    source = read_draft(directory, config)
    check_pair(source.spec, partner.spec, draft_name=draft, target_name=target)
    return source, partner


def read_partner(
    target: str, draft: str, draft_config: Facts, find_target: Callable[[str], Path] = configuration_directory
) -> TargetCheckpoint:
    """The target of a draft whose config.json is `draft_config`; raises CheckpointError for a draft in its place."""
    directory = find_target(target)
    config = read_config(directory)
    if is_draft(config) and not is_draft(draft_config):
        raise CheckpointError(
            f"draft and target are swapped: {target} is a draft, {draft} is not",
            hint=f"give {target} as the draft, and --target {draft}",
        )
    return read_target(directory, config)
