# SPDX-License-Identifier: Apache-2.0
"""Checks a runtime's configuration: against the release's schema, and against models and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.flags import is_command, normalize, parse_command
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.rules import sglang_rules, trtllm_rules, vllm_rules
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.target_rules import context_length, remote_code
from dflash_trt.deploy.schema import Schema, runtime_keys
from dflash_trt.deploy.schema_check import check_schema, coerce
from dflash_trt.deploy.sizes import DraftSizes, draft_sizes, target_sizes
from dflash_trt.deploy.trtllm_arguments import converted_draft
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.command import quoted
from dflash_trt.files.read import is_directory, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES, yaml_document

RULES = {"trtllm": trtllm_rules, "vllm": vllm_rules, "sglang": sglang_rules}
DEPLOYMENT_KEYS = {"target", "draft"}  # no runtime has both on its top level


def check(config: CheckedConfig) -> list[Finding]:
    """Every finding, the schema's first."""
    document, findings = coerce(config.schema, config.document)
    config = msgspec.structs.replace(config, document=document)
    findings += check_schema(config.schema, document)
    rules = RULES[config.schema.runtime]
    for rule in (remote_code, context_length, *rules.RULES, *(rules.DFLASH_RULES if rules.is_dflash(config) else ())):
        findings += rule(config)
    return findings


def deployment_config(deployment: ResolvedDeployment, schema: Schema, document: dict[str, Any]) -> CheckedConfig:
    """`document` with the models and GPUs that a deployment states; only TensorRT-LLM knows engine mode."""
    is_engine = deployment.mode == "engine" and schema.runtime == "trtllm"
    is_base = deployment.mode == "engine" and not is_engine
    return CheckedConfig(
        schema=schema,
        document=document,
        gpus=deployment.gpus,
        draft=deployment.draft_sizes,
        target=deployment.target_sizes,
        target_name=deployment.target,
        algorithms={} if is_base else deployment.algorithms,
        mode="engine" if is_engine else "native",
        num_ranks=deployment.num_ranks if is_engine else 1,
    )


def file_config(
    file: Path, schema: Schema, *, gpus: Gpus | None, target: str | None, draft: str | None
) -> CheckedConfig:
    """The arguments in `file`, with the models and GPUs that it or the user names.

    Raises ConfigError when the file is neither a YAML mapping nor a command line, CheckpointError when it names a
    directory that is no draft.
    """
    document = read_document(file, schema)
    named = draft or schema.setting(document, runtime_keys()[schema.runtime].draft)
    sizes: DraftSizes | None = None
    ranks: int | None = None
    if isinstance(named, str):
        sizes = draft_sizes(named) or _original(named)
        ranks = read_num_ranks(Path(named)) if is_directory(named) else None
    return CheckedConfig(
        schema=schema,
        document=document,
        gpus=gpus,
        draft=sizes,
        target=None if target is None else target_sizes(target),
        target_name=target,
        algorithms={} if sizes is None else sizes.quantized,
        mode="native" if ranks is None else "engine",
        num_ranks=ranks or 1,
    )


def _original(name: str) -> DraftSizes | None:
    """The published draft whose copy, not here yet, a configuration of ours names."""
    published = (draft_sizes(draft) for draft in published_drafts())
    return next((sizes for sizes in published if sizes and converted_draft(sizes) == name), None)


def read_document(file: Path, schema: Schema) -> dict[str, Any]:
    """The arguments in a YAML file, or in a file with the command line of vLLM or SGLang."""
    text = read_text(file, ConfigError, limit=MAX_BYTES)
    if schema.runtime != "trtllm" and is_command(text, schema.runtime):
        try:
            return parse_command(text, schema)
        except ValueError as problem:  # an open quote
            raise ConfigError(f"{file}: expected a command line, found: {problem}") from None
    document = yaml_document(text, file, ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: expected a mapping of {schema.runtime}'s arguments, found {shown(document)}")
    if document.keys() >= DEPLOYMENT_KEYS:
        raise ConfigError(
            f"{file}: expected a configuration of {schema.runtime}, found a deployment, from which one is written",
            hint=f"this writes it, checked: dflash-trt serve-config {quoted(file)} --runtime {schema.runtime}",
        )
    if schema.runtime == "trtllm":  # a Triton repository's model.yaml also says how it is served
        return {key: value for key, value in document.items() if key != "triton_config"}
    return normalize(document, schema)
