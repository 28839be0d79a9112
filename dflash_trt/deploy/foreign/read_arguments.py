# SPDX-License-Identifier: Apache-2.0
"""Arguments of the servers in a file that others wrote: a manifest, a script, or YAML of arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.finding import UNCHECKED, Finding
from dflash_trt.deploy.flags import is_argument, parse_arguments
from dflash_trt.deploy.foreign.argument_file import argument_words, with_argument_file
from dflash_trt.deploy.foreign.containers import Found, manifest_kind, manifest_servers
from dflash_trt.deploy.foreign.dynamo_words import dynamo_values
from dflash_trt.deploy.foreign.named_file import unread_files
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.script import text_servers
from dflash_trt.deploy.trtllm_serve import trtllm_document
from dflash_trt.errors import ConfigError, cut, shown
from dflash_trt.files.command import quoted
from dflash_trt.files.strict_yaml import yaml_document, yaml_documents

DEPLOYMENT_KEYS = {"target", "draft"}  # no runtime has both on its top level
MANIFEST = re.compile(r"^(apiVersion|services):", re.MULTILINE)
DISAGGREGATED = (
    "a file of `trtllm-serve disaggregated`, which names servers",
    "check the file that each of its servers is started with",
)  # fmt: skip
TRTLLM = ("trtllm-serve",)
OTHER_SUBCOMMANDS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve")
"""Commands of trtllm-serve that start no server of a language model by themselves."""
OTHER_KINDS = {
    "context_servers": DISAGGREGATED,
    "generation_servers": DISAGGREGATED,
    "extra_llm_api_options": (
        "arguments below extra_llm_api_options",
        "move them to the top level of a file of their own",
    ),
    "servingEngineSpec": ("values of vLLM's production stack", "check what helm template writes"),
    "replicaCount": ("values of a Helm chart", "check what helm template writes"),
    "scrape_configs": ("a configuration of Prometheus", "check the command that starts the server"),
    "deployment": ("a deployment of another tool", "check the command that starts the server"),
}
"""Kinds of YAML file without arguments on the top level, by a key, with what to check in their place."""


def read_arguments(text: str, file: Path, schema: Schema) -> list[CheckedConfig]:
    """The arguments of each server in the text of `file`, a manifest, a script or YAML; of its models nothing is known.

    Raises ConfigError for a text without a server or argument of the runtime, naming what it is.
    """
    documents = _manifests(text, file)
    if documents is None:
        found = [Found(server, []) for server in text_servers(text)]
    else:
        found = manifest_servers(documents, file)
    if not found:
        return [_read_yaml(text, file, schema)]
    ours = [each for each in found if each.server.runtime == schema.runtime]
    if not ours:
        other = found[0].server.runtime
        raise ConfigError(
            f"{file}: expected a server of {schema.runtime}, found one of {other}",
            hint=f"dflash-trt serve-config --check {quoted(file)} --runtime {other}",
        )
    read = [_read_server(each, file, schema) for each in ours]
    others = sorted({each.server.runtime for each in found} - {schema.runtime})
    findings = [
        Finding(
            "other-server", UNCHECKED, "file", f"a server of {other} in {file.name}", f"give --runtime {other}, too"
        )
        for other in others
    ]
    return [msgspec.structs.replace(read[0], reading=[*findings, *read[0].reading]), *read[1:]]


def _manifests(text: str, file: Path) -> list[Any] | None:
    """The documents of a Kubernetes manifest or a Compose file; None for another text."""
    if not MANIFEST.search(text):
        return None
    try:
        documents = yaml_documents(text, file, ConfigError)
    except ConfigError:
        if text_servers(text):  # a script that writes one
            return None
        raise
    return documents if any(map(manifest_kind, documents)) else None


def _read_server(found: Found, file: Path, schema: Schema) -> CheckedConfig:
    server = found.server
    if not server.words:
        raise ConfigError(f"{file}: {' '.join(server.program)} is given neither a model nor an argument")
    if server.program == TRTLLM and server.words[0] in OTHER_SUBCOMMANDS:
        raise ConfigError(
            f"{file}: expected a server of trtllm, found `trtllm-serve {server.words[0]}`", hint=DISAGGREGATED[1]
        )
    if schema.runtime == "trtllm":
        document, findings, is_whole = trtllm_document(server, file)
    else:
        words, findings, is_whole = with_argument_file(server, file, schema)
        document, parsed = parse_arguments(list(map(str, words)), schema)
        document.pop("config", None)
        findings = findings + parsed
    unread = unread_files(server, document)
    reading = [*found.findings, *findings, *unread]
    return CheckedConfig(
        schema=schema, document=document, reading=reading, environment=server.environment, is_whole=is_whole,
        dynamo=dynamo_values(server),
    )  # fmt: skip


def _read_yaml(text: str, file: Path, schema: Schema) -> CheckedConfig:
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
    _refuse_unrecognised(document, file, schema)
    if schema.runtime == "trtllm":  # key of a Triton repository's model.yaml
        arguments = {key: value for key, value in document.items() if key != "triton_config"}
        findings: list[Finding] = []
    else:
        words, findings = argument_words(document, schema, name=file.name)
        arguments, parsed = parse_arguments(words, schema)
        findings += parsed
    return CheckedConfig(schema=schema, document=arguments, reading=findings)


def _refuse_unrecognised(document: dict[Any, Any], file: Path, schema: Schema) -> None:
    """ConfigError for a file without any argument of the runtime, with the kind of file that it is."""
    keys = cut(", ".join(map(str, document))) or "no key"
    for key, (kind, hint) in OTHER_KINDS.items():
        if key in document:
            raise ConfigError(f"{file}: expected arguments of {schema.runtime}, found {kind} ({keys})", hint=hint)
    if not any(is_argument(str(key).partition(".")[0], schema) for key in document):
        raise ConfigError(
            f"{file}: no key is an argument of {schema.runtime}: {keys}",
            hint="check the command that starts the server, or the file that it names; Helm values after helm template",
        )
