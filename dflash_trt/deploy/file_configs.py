# SPDX-License-Identifier: Apache-2.0
"""Configurations of servers in a file: YAML, or a script that starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.checker import deployment_config
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.flags import normalize, parse_arguments
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.rules.checked_config import BLOCKS, METHOD_KEYS, CheckedConfig, served_target
from dflash_trt.deploy.schema import Schema, runtime_keys
from dflash_trt.deploy.script import Server, servers
from dflash_trt.deploy.serving import ServedModels
from dflash_trt.deploy.sizes import DraftSizes, draft_sizes, target_sizes
from dflash_trt.deploy.trtllm_arguments import converted_draft
from dflash_trt.deploy.trtllm_serve import trtllm_document
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.command import quoted
from dflash_trt.files.read import is_directory, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES, yaml_document

DEPLOYMENT_KEYS = {"target", "draft"}  # no runtime has both on its top level


def file_configs(
    file: Path, schema: Schema, *, text: str | None = None, deployment: ResolvedDeployment | None = None,
    gpus: Gpus | None = None, target: str | None = None, draft: str | None = None,
) -> list[CheckedConfig]:  # fmt: skip
    """Each server's arguments in a YAML file or a script, with the models and GPUs of a deployment, or that are named.

    A `text` stands for what is in the file; what it names is looked for beside it. Raises ConfigError when it is
    neither a YAML mapping nor starts a server of the runtime, CheckpointError when it names a directory that is no
    draft.
    """
    text, configs = read_text(file, ConfigError, limit=MAX_BYTES) if text is None else text, []
    for document, reading, environment in _read(text, file, schema):
        if deployment is not None:
            config = deployment_config(deployment, schema, document)
        else:
            config = _named_config(document, schema, gpus=gpus, target=target, draft=draft)
        configs.append(msgspec.structs.replace(config, reading=reading, environment=environment))
    return configs


def text_servers(text: str) -> list[Server]:
    """Every server that a text starts; none where it is YAML."""
    try:
        return servers(text)
    except ValueError:  # an open quote: an apostrophe
        return []


def _named_config(
    document: dict[str, Any], schema: Schema, *, gpus: Gpus | None, target: str | None, draft: str | None
) -> CheckedConfig:
    """`document` with the models and GPUs that it or the user names."""
    named = draft or schema.setting(document, runtime_keys()[schema.runtime].draft)
    target = target or served_target(document)
    sizes: DraftSizes | None = None
    ranks: int | None = None
    decoding = str(schema.setting(document, METHOD_KEYS[schema.runtime]) or "").lower()
    if isinstance(named, str) and (draft or decoding in BLOCKS):
        sizes = draft_sizes(named) or _original(named)
        ranks = read_num_ranks(Path(named)) if is_directory(named) else None
    served = ServedModels(
        target=target,
        checkpoint=None if sizes is None else sizes.name,
        gpus=gpus,
        draft_sizes=sizes,
        target_sizes=None if target is None else target_sizes(target),
        algorithms={} if sizes is None else sizes.quantized,
        mode="native" if ranks is None else "engine",
        num_ranks=ranks or 1,
    )
    return CheckedConfig(schema=schema, document=document, served=served)


def _original(name: str) -> DraftSizes | None:
    """The published draft whose copy, not here yet, a configuration of ours names."""
    published = (draft_sizes(draft) for draft in published_drafts())
    return next((sizes for sizes in published if sizes and converted_draft(sizes) == name), None)


def _read(text: str, file: Path, schema: Schema) -> list[tuple[dict[str, Any], list[Finding], dict[str, str]]]:
    """The arguments of each server in a text, what reading them found, and its environment."""
    found = text_servers(text)
    if not found:
        return [(_read_yaml(text, file, schema), [], {})]
    ours = [server for server in found if server.runtime == schema.runtime]
    if not ours:
        raise ConfigError(
            f"{file}: expected a server of {schema.runtime}, found one of {found[0].runtime}",
            hint=f"dflash-trt serve-config --check {quoted(file)} --runtime {found[0].runtime}",
        )
    if schema.runtime == "trtllm":
        return [(*trtllm_document(server, file), server.environment) for server in ours]
    return [(*parse_arguments([*map(str, server.words)], schema), server.environment) for server in ours]


def _read_yaml(text: str, file: Path, schema: Schema) -> dict[str, Any]:
    document = yaml_document(text, file, ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file}: expected a mapping of {schema.runtime}'s arguments, or a command that starts it, found"
            f" {shown(document)}"
        )
    if document.keys() >= DEPLOYMENT_KEYS:
        raise ConfigError(
            f"{file}: expected a configuration of {schema.runtime}, found a deployment, from which one is written",
            hint=f"this writes it, checked: dflash-trt serve-config {quoted(file)} --runtime {schema.runtime}",
        )
    if schema.runtime == "trtllm":  # key of a Triton repository's model.yaml
        return {key: value for key, value in document.items() if key != "triton_config"}
    return normalize(document, schema)
