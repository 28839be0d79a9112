# SPDX-License-Identifier: Apache-2.0
"""A draft and the target that it drafts for, as a user names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_trt.checkpoint.dialects.recognise import is_draft
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.hub import fetch_weights
from dflash_trt.checkpoint.source import configuration_directory
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, check_pair, read_target
from dflash_trt.errors import CheckpointError


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
