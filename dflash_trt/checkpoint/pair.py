# SPDX-License-Identifier: Apache-2.0
"""Reads a draft together with its target, and checks that they fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_trt.checkpoint.dialects.recognise import is_draft, read_config
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.checkpoint.target_checkpoint import PartialTargetSpec, TargetCheckpoint, read_target
from dflash_trt.errors import CheckpointError

AVERAGED = ("deepseek_v4", "glm5_next")
"""Targets whose streams are averaged into a tap of one stream's width: vLLM 0.33 (both), SGLang 0.5.23 (GLM-5.3)."""


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
    """Raises CheckpointError where the target's layers give no taps of width `width`, or it is unknown which."""
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
    """Reads both; raises CheckpointError where one is damaged, they do not fit, or they are swapped.

    Weights of repositories are fetched after config.json has shown which is the draft.
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
    """The target of a draft whose config.json is `draft_config`; raises CheckpointError if the two are swapped."""
    directory = find_target(target)
    config = read_config(directory)
    if is_draft(config) and not is_draft(draft_config):
        raise CheckpointError(
            f"draft and target are swapped: {target} is a draft, {draft} is not",
            hint=f"give {target} as the draft, and --target {draft}",
        )
    return read_target(directory, config)
