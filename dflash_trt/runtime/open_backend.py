# SPDX-License-Identifier: Apache-2.0
"""Opens the runtime of an engine directory, here, or of a deployment, in TensorRT-LLM; loads torch last of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.api.backend import Backend
from dflash_trt.api.runtime_options import DEFAULT_BATCH_SIZE, DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import is_integer
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.source import configuration_directory, is_local
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, TargetSpec, check_pair, read_target
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.deploy.deployment_file import deployment_path, refuse_deployment
from dflash_trt.engine.manifest import Manifest, read_manifest, sha256
from dflash_trt.errors import EngineError, RequestError, shown
from dflash_trt.files.command import quoted
from dflash_trt.runtime.progress_display import progress_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.embedded_backend import EmbeddedBackend


def open_backend(engine_or_deployment: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS) -> Backend:
    """Opens an engine directory or a deployment, with its own target or the one called `target`.

    A deployment accepts no option here except draft_length=0. Raises what `CheckedPair.read` and `open_embedded`
    raise, or TrtllmBackend.
    """
    if (config := deployment_path(str(engine_or_deployment))) is None:
        return open_embedded(CheckedPair.read(Path(engine_or_deployment), target), options)
    from dflash_trt.deploy.deployment_file import load_deployment
    from dflash_trt.deploy.resolve import resolve
    from dflash_trt.trtllm.llm_backend import TrtllmBackend

    is_plain = options.draft_length == 0
    for name in RuntimeOptions.__struct_fields__:
        if getattr(options, name) != getattr(DEFAULTS, name) and not (name == "draft_length" and is_plain):
            raise RequestError(f"{name}: expected none, because the deployment file {config} sets it")
    deployment = resolve(load_deployment(config), config.stem, target=target)
    return TrtllmBackend.open(deployment, "none" if is_plain else "dflash")


def open_engine(engine: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS) -> EmbeddedBackend:
    """Opens an engine directory here; raises what `open_embedded` raises, EngineError for a deployment."""
    refuse_deployment(engine)
    return open_embedded(CheckedPair.read(Path(engine), target), options)


def open_embedded(pair: CheckedPair, options: RuntimeOptions = DEFAULTS) -> EmbeddedBackend:
    """Loads a checked pair; raises what `load_session` raises, RequestError for ranks, which `generate --tp` joins."""
    if options.num_ranks != 1:
        hint = "dflash-trt generate --tp N joins ranks"
        raise RequestError(f"num_ranks: expected 1, found {options.num_ranks}", hint=hint)
    with progress_line(f"loading {pair.target_name}"):
        from dflash_trt.runtime.embedded_backend import EmbeddedBackend
        from dflash_trt.runtime.session import load_session  # it loads torch: seconds

        return EmbeddedBackend(load_session(pair, options), options)


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
        raise EngineError(f"{engine}: expected a manifest that names the target, found none", hint=hint)
    if source.revision is None and not is_local(source.name):
        raise EngineError(f"{engine} was built for target {source.name}, which is no directory here", hint=hint)
    directory = configuration_directory(source.name, source.revision)
    if (file := directory / "config.json").is_file() and sha256(file) != source.config_sha256:
        raise EngineError(
            f"{file} has changed since {engine} was built",
            hint=f"build again, or accept it as it is: --target {quoted(Path(source.name))}",
        )
    return source.name, directory


def check_prompt(prompt_ids: Sequence[int], max_tokens: int, draft: DraftSpec, target: TargetSpec) -> None:
    """Raises RequestError for an invalid prompt, and for one too long for target or draft with `max_tokens`."""
    if not prompt_ids:
        raise RequestError("prompt: expected at least one token, found an empty prompt")
    vocabulary = range(target.vocab_size)
    if wrong := [token for token in prompt_ids if not (is_integer(token) and int(token) in vocabulary)]:
        raise RequestError(f"prompt: expected token ids from 0 to {target.vocab_size - 1}, found {shown(wrong[0])}")
    if draft.mask_token_id in prompt_ids:
        raise RequestError(f"prompt: expected text, found the draft's mask token {draft.mask_token_id}")
    limit = max_positions(draft, target)
    if (length := len(prompt_ids) + max_tokens) > limit:
        raise RequestError(
            f"prompt: expected at most {limit} tokens (max_position_embeddings), found {len(prompt_ids)}"
            f" in the prompt + {max_tokens} new ones = {length}",
            hint="lower --max-tokens or shorten the prompt",
        )


def max_positions(draft: DraftSpec, target: TargetSpec) -> int:
    """Positions that both target and draft have."""
    return min(draft.max_position_embeddings, target.max_position_embeddings)


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
