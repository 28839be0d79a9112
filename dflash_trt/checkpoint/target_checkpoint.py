# SPDX-License-Identifier: Apache-2.0
"""The target checkpoint: only the facts that a drafter depends on, and the check that a draft fits them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects.recognise import is_draft
from dflash_trt.checkpoint.dialects.refused import refuse_stranger
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights, read_headers
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

MAX_LAYERS = 4096  # far beyond any target: transformers makes them one by one


class PartialTargetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a target model: all of it (`TargetSpec`), or what was published; None is not known."""

    model_type: str | None = None
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int | None = None


class TargetSpec(PartialTargetSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of a target model that its drafter depends on: narrows what may be unknown, adds nothing."""

    model_type: str
    max_position_embeddings: int


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
    config = config or Facts.load(directory / "config.json")
    spec, text = read_target_spec(config)
    if (weights := read_headers(directory)) is None:
        weights = read_weights(directory)
    _check_embedding(directory, spec, weights)
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
        num_hidden_layers=text.integer("num_hidden_layers", maximum=MAX_LAYERS),
        vocab_size=text.integer("vocab_size"),
        max_position_embeddings=text.integer("max_position_embeddings"),
    )
    return spec, text


def _check_embedding(directory: Path, spec: TargetSpec, weights: dict[str, StoredTensor]) -> None:
    tables = [tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight")]
    if len(tables) != 1:
        found = ", ".join(tensor.name for tensor in tables) or "none"
        raise CheckpointError(f"{directory}: expected one tensor named *embed_tokens.weight, found {found}")
    table, shape = tables[0], (spec.vocab_size, spec.hidden_size)
    if table.shape != shape:
        raise CheckpointError(
            f"{table.file}: tensor {table.name!r}: expected shape {list(shape)}, found {list(table.shape)}"
        )


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
    if (draft.tap_hidden_size or draft.hidden_size) != target.hidden_size:
        raise refuse("hidden_size", target.hidden_size, draft.tap_hidden_size or draft.hidden_size)
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


def read_pair(
    draft: str, target: str, find_target: Callable[[str], Path] = configuration_directory
) -> tuple[DraftCheckpoint, TargetCheckpoint]:
    """Reads both; raises CheckpointError where one is damaged, they do not fit, or each is in the other's place.

    Weights of repositories are fetched once it is known which is the draft.
    """
    directory = configuration_directory(draft)
    config = Facts.load(directory / "config.json")
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
    config = Facts.load(directory / "config.json")
    if is_draft(config) and not is_draft(draft_config):
        raise CheckpointError(
            f"draft and target are swapped: {target} is a draft, {draft} is not",
            hint=f"give {target} as the draft, and --target {draft}",
        )
    return read_target(directory, config)
