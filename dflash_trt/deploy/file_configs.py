# SPDX-License-Identifier: Apache-2.0
"""Configurations of servers in a file: YAML, or a script that starts them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.catalog import known_draft
from dflash_trt.deploy.foreign.read_arguments import read_arguments
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, ServedModels, served_by
from dflash_trt.deploy.rules.checked_config import BLOCKS, CheckedConfig, served_target
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.sizes import DraftSizes, draft_sizes, target_sizes
from dflash_trt.deploy.trtllm_arguments import converted_draft
from dflash_trt.deploy.vllm_speculation import with_short_flags
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.files.read import is_directory, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES


def file_configs(
    file: Path, schema: Schema, *, text: str | None = None, deployment: ResolvedDeployment | None = None,
    gpus: Gpus | None = None, target: str | None = None, draft: str | None = None,
) -> list[CheckedConfig]:  # fmt: skip
    """Each server's arguments in a YAML file or a script, with the models and GPUs of a deployment, or that are named.

    A `text` stands for what is in the file; what it names is looked for beside it. Raises ConfigError when it is
    neither a YAML mapping nor starts a server of the runtime, CheckpointError when it names a directory that is no
    draft.
    """
    text = read_text(file, ConfigError, limit=MAX_BYTES) if text is None else text
    configs = read_arguments(text, file, schema)
    if deployment is not None:
        served = served_by(deployment, schema.runtime)
        return [msgspec.structs.replace(config, served=served) for config in configs]
    return [
        msgspec.structs.replace(config, served=_named_models(config.document, schema, gpus, target, draft))
        for config in configs
    ]


def _named_models(
    document: dict[str, Any], schema: Schema, gpus: Gpus | None, target: str | None, draft: str | None
) -> ServedModels:
    """The models and GPUs that a document or the user names."""
    speculation = with_short_flags(document)[0] if schema.runtime == "vllm" else document
    named = draft or schema.setting(speculation, schema.keys.draft)
    target = target or served_target(document)
    sizes: DraftSizes | None = None
    ranks: int | None = None
    decoding = str(schema.setting(speculation, schema.keys.method) or "").lower()
    if isinstance(named, str) and (draft or decoding in BLOCKS):
        sizes = draft_sizes(named) or _catalogued(named) or _original(named)
        ranks = read_num_ranks(Path(named)) if is_directory(named) else None
    elif isinstance(named, str) and not decoding:  # the runtime infers the method: it may be an ordinary model
        with suppress(CheckpointError):
            sizes = draft_sizes(named) or _catalogued(named)
    return ServedModels(
        target=target,
        checkpoint=None if sizes is None else sizes.name,
        gpus=gpus,
        draft_sizes=sizes,
        target_sizes=None if target is None else target_sizes(target),
        algorithms={} if sizes is None else sizes.quantized,
        mode="native" if ranks is None else "engine",
        num_ranks=ranks or 1,
    )


def _catalogued(name: str) -> DraftSizes | None:
    """A draft whose facts the catalogue alone has."""
    known = known_draft(name)
    return None if known is None or known.spec is None else DraftSizes(name=known.draft, spec=known.spec)


def _original(name: str) -> DraftSizes | None:
    """The published draft whose copy, not here yet, a configuration of ours names."""
    published = (draft_sizes(draft) for draft in published_drafts())
    return next((sizes for sizes in published if sizes and converted_draft(sizes) == name), None)
