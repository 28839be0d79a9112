# SPDX-License-Identifier: Apache-2.0
"""Arguments of runtimes that no key of a deployment file stands for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line
from dflash_trt.files.strict_yaml import yaml_document

OWN = {"model", "model_tag", "model_path", "host", "port"}
"""Arguments that target, --host and --port decide."""
OF_DRAFTS = ("speculative", "spec_")
"""Beginnings of the names of arguments that describe a draft."""


class RuntimeArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments by runtime, beside and over those that are written."""

    vllm: tuple[str, ...] = ()
    """Flags and values, one or several words each."""
    sglang: tuple[str, ...] = ()
    trtllm: dict[str, Any] = {}
    """Keys of the YAML file, those of sections below them."""

    def of(self, runtime: Runtime, where: str) -> dict[str, Any]:
        """The arguments of a runtime by name; ConfigError, naming `where`, for other words and for the model's."""
        if runtime == "trtllm":
            found = self.trtllm
        else:
            words = [word for text in getattr(self, runtime) for word in shlex.split(text)]
            found, findings = parse_arguments(words, load_schema(runtime))
            if findings:
                raise ConfigError(f"{where}: {findings[0]}")
        if decided := sorted(OWN & found.keys()):
            raise ConfigError(
                f"{where}: expected arguments that nothing else decides, found {decided[0]}",
                hint="give target in the deployment, or --host and --port",
            )
        return found


def from_pairs(runtime: Runtime, settings: Sequence[str]) -> RuntimeArguments:
    """Arguments given as KEY=VALUE, KEY.KEY=VALUE for those of a section; ConfigError for another form."""
    added: dict[str, Any] = {}
    words: list[str] = []
    for setting in settings:
        key, is_joined, value = setting.partition("=")
        if not is_joined or not key:
            raise ConfigError(f"--set: expected KEY=VALUE, found {setting!r}")
        words.append(command_line([f"--{key.lstrip('-').replace('_', '-')}", value]))
        added = merged(added, nested(key, yaml_document(value, Path("--set"), ConfigError)))
    if runtime == "trtllm":
        return RuntimeArguments(trtllm=added)
    return RuntimeArguments(vllm=tuple(words)) if runtime == "vllm" else RuntimeArguments(sglang=tuple(words))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """A mapping with the value at a dotted path."""
    outer, _, inner = path.partition(".")
    return {outer: nested(inner, value) if inner else value}
