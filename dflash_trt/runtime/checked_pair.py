# SPDX-License-Identifier: Apache-2.0
"""An engine directory and a target that fit each other, and the prompts that they can answer; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.api.fields import is_integer
from dflash_trt.api.runtime_options import DEFAULT_BATCH_SIZE
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.source import configuration_directory, is_local
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, TargetSpec, read_target
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.engine.manifest import Manifest, read_manifest, sha256, target_path
from dflash_trt.errors import EngineError, RequestError, shown
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPair:
    """An engine directory and a target that fit each other, read without loading a weight."""

    engine: Path
    manifest: Manifest
    target_name: str
    target: TargetCheckpoint
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def read(cls, engine: Path, target_name: str | None = None) -> CheckedPair:
        """Reads both; raises EngineError for a damaged engine or another target, CheckpointError for a damaged target.

        `target_name` is as for `find_target`.
        """
        manifest = read_manifest(engine)
        name, directory = find_target(engine, manifest, target_name)
        target = read_target(directory)
        _check_target(manifest, target.spec, engine, name)
        tokenizer = load_tokenizer(directory)
        return cls(engine=engine, manifest=manifest, target_name=name, target=target, tokenizer=tokenizer)


def find_target(engine: Path, manifest: Manifest, name: str | None) -> tuple[str, Path]:
    """Name and directory of the target called `name`, else of the one that the engine was built for.

    Raises EngineError where the manifest names none, or one that is missing here or has changed.
    """
    if name is not None:
        return name, configuration_directory(name)
    hint = "give --target the model that the engine was built for"
    if (source := manifest.target_source) is None:
        raise EngineError(f"the manifest of {engine} does not name its target", hint=hint)
    target = target_path(engine, source)
    if source.revision is None and not is_local(target):
        raise EngineError(f"{engine} was built for target {target}, which is no directory here", hint=hint)
    directory = configuration_directory(target, source.revision)
    if (file := directory / "config.json").is_file() and sha256(file) != source.config_sha256:
        raise EngineError(
            f"{file} has changed since {engine} was built",
            hint=f"build again, or accept it as it is: --target {quoted(Path(target))}",
        )
    return target, directory


def check_prompt(
    prompt_ids: Sequence[int], max_tokens: int, draft: DraftSpec, target: TargetSpec, *, is_all_drafted: bool = False
) -> None:
    """Raises RequestError for an invalid prompt, and for one too long for the target with `max_tokens`.

    With `is_all_drafted`, also for one that is too long for the draft, whose last tokens would have no drafts.
    """
    if not prompt_ids:
        raise RequestError("prompt: expected at least one token, found an empty prompt")
    vocabulary = range(target.vocab_size)
    if wrong := [token for token in prompt_ids if not (is_integer(token) and int(token) in vocabulary)]:
        raise RequestError(f"prompt: expected token ids from 0 to {target.vocab_size - 1}, found {shown(wrong[0])}")
    if draft.mask_token_id in prompt_ids:
        raise RequestError(f"the prompt contains the draft's mask token {draft.mask_token_id}")
    positions = {"target": target.max_position_embeddings}
    if is_all_drafted:
        positions["draft"] = draft.max_position_embeddings
    whose, limit = min(positions.items(), key=lambda item: item[1])
    if (length := len(prompt_ids) + max_tokens) > limit:
        raise RequestError(
            f"prompt: expected at most {limit} tokens (max_position_embeddings of the {whose}), found {len(prompt_ids)}"
            f" in the prompt + {max_tokens} new ones = {length}",
            hint="lower --max-tokens or shorten the prompt",
        )


def default_batch_size(manifest: Manifest) -> int:
    """Requests that the engine's TensorRT plans hold; DEFAULT_BATCH_SIZE without plans."""
    return DEFAULT_BATCH_SIZE if manifest.plan_options is None else manifest.plan_options.max_batch_size


def _check_target(manifest: Manifest, target: TargetSpec, engine: Path, target_name: str) -> None:
    check_pair(manifest.draft, target, draft_name=str(engine), target_name=target_name)
    for fact in TargetSpec.__struct_fields__:
        built_for, found = getattr(manifest.target, fact), getattr(target, fact)
        if built_for != found:
            raise EngineError(
                f"{engine} was built for another target than {target_name}: {fact}: expected"
                f" {built_for}, found {found}",
                hint="give --target the model that the engine was built for",
            )
