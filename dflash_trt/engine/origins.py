# SPDX-License-Identifier: Apache-2.0
"""Provenance of an engine: names and hashes of draft and target, for its manifest."""

from __future__ import annotations

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.quantization import HF_QUANT_CONFIG
from dflash_trt.checkpoint.source import checkpoint_label, is_local, label_text
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import weight_files
from dflash_trt.engine.manifest import Source, TargetSource, sha256
from dflash_trt.quantize.recipe import Recipe


def describe_source(draft: DraftCheckpoint, name: str, recipe: Recipe | None = None) -> Source:
    """Provenance of the checkpoint that the user called `name`, and the recipe that quantised it."""
    files = [draft.config.file, draft.directory / HF_QUANT_CONFIG, *weight_files(draft.weights)]
    hashes = {file.name: sha256(file) for file in files if file.is_file()}
    return Source(name=checkpoint_label(name), recipe=None if recipe is None else recipe.name, sha256=hashes)


def describe_target(target: TargetCheckpoint, name: str) -> TargetSource:
    """Provenance of the target that the user called `name`."""
    revision = (
        None if is_local(name) else target.directory.name
    )  # directories of snapshots in the hub's cache are named so
    return TargetSource(
        name=label_text(name), revision=revision, config_sha256=sha256(target.directory / "config.json")
    )
