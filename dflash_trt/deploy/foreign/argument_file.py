# SPDX-License-Identifier: Apache-2.0
"""YAML files of arguments (`--config FILE`) as words of a command line, as vLLM and SGLang make them.

vLLM 0.33.0: load_config_file and _pull_args_from_config in vllm/utils/argparse_utils.py. SGLang 0.5.23:
ConfigArgumentMerger in sglang/srt/utils/server_args_config_parser.py. Both put the words of the file before those of
the command, whose own arguments win, and both look for the word `--config` alone: not --config=FILE, nor a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.deploy.finding import ERROR, WARNING, Finding
from dflash_trt.deploy.foreign.dynamo_words import runtime_words
from dflash_trt.deploy.foreign.named_file import named_arguments
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.script import Server
from dflash_trt.errors import ConfigError, cut, shown

FLAG = "--config"
SUFFIXES = (".yaml", ".yml")
SUBCOMMAND = "serve"
"""Word of a vLLM program whose top-level parser reads the file, and does not know the negated forms of flags."""


def with_argument_file(server: Server, script: Path, schema: Schema) -> tuple[list[str], list[Finding], bool]:
    """Words of a command with those of the file that it names, findings, and whether all arguments were read.

    Raises ConfigError for a file that is not there, or that the runtime refuses.
    """
    words, findings = runtime_words(server)
    if FLAG not in words:
        return words, findings + [_ignored(word, schema) for word in words if word.startswith(f"{FLAG}=")], True
    at = words.index(FLAG)
    if FLAG in words[at + 1 :]:
        raise ConfigError(f"{script}: {FLAG} is given twice, which the runtime refuses")
    if at + 1 == len(words):
        raise ConfigError(f"{script}: {FLAG} names no file")
    name, rest = words[at + 1], [*words[:at], *words[at + 2 :]]
    if Path(name).suffix not in SUFFIXES and "$" not in name:
        raise ConfigError(f"{script}: the runtime refuses {shown(name)} for {FLAG}: its name must end in .yaml or .yml")
    found = named_arguments(name, server.files, script)
    if isinstance(found, Finding):
        return rest, [*findings, found], False
    is_subcommand = SUBCOMMAND in server.program
    added, dropped = argument_words(found, schema, name=name, is_subcommand=is_subcommand)
    position = 1 if is_subcommand and rest and not rest[0].startswith("-") else 0
    return [*rest[:position], *added, *rest[position:]], [*findings, *dropped], True


def _ignored(word: str, schema: Schema) -> Finding:
    """The finding for --config=FILE, whose file is not opened."""
    problem = f"{schema.runtime} does not open the file of {cut(word)}: it looks for the word {FLAG} alone"
    return Finding("unopened-file", ERROR, "config", problem, f"write {FLAG}, a space and the file")


def argument_words(
    document: dict[Any, Any], schema: Schema, *, name: str, is_subcommand: bool = True
) -> tuple[list[str], list[Finding]]:
    """The words that vLLM or SGLang makes of the file `name`, and a finding for each key that it drops.

    `is_subcommand` says whether vLLM's top-level parser reads it, as in `vllm serve`. Raises ConfigError for a key that
    is no text.
    """
    words: list[str] = []
    findings = []
    for key, value in document.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name}: expected names of arguments as keys, found {shown(key)}")
        if value is False:
            added, found = _switched_off(key, schema, is_subcommand=is_subcommand)
            words += added
            findings += found
        elif value is True:
            words += [f"--{key}"] if schema.runtime == "vllm" or _is_boolean(key, schema) else [f"--{key}", "true"]
            findings += _refused(key, schema)
        elif isinstance(value, list):
            words += [f"--{key}", *map(_text, value)] if value else []
        else:
            words += [f"--{key}", _text(value)]
    return words, findings


def _text(value: object) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict) else str(value)


def _described(key: str, schema: Schema) -> dict[str, Any] | None:
    name = schema.names().get(key.replace("-", "_"))
    return None if name is None else schema.properties().get(name)


def _is_boolean(key: str, schema: Schema) -> bool:
    return "boolean" in (_described(key, schema) or {}).get("type", [])


def _refused(key: str, schema: Schema) -> Iterator[Finding]:
    """SGLang's flags with a --no- form, which are those that are not off by default."""
    described = _described(key, schema) or {}
    if schema.runtime == "sglang" and _is_boolean(key, schema) and described.get("default") is not False:
        problem = "SGLang refuses this key in a file: its flag has a --no- form"
        yield Finding("refused-key", ERROR, key, problem, "give it on the command line")


def _switched_off(key: str, schema: Schema, *, is_subcommand: bool) -> tuple[list[str], list[Finding]]:
    """Words for `key: false`: `vllm serve` and switches of SGLang drop it, and the default stays."""
    described = _described(key, schema)
    if schema.runtime == "sglang":
        return ([] if _is_boolean(key, schema) else [f"--{key}", "false"]), list(_refused(key, schema))
    if described is None:
        return ([] if key.startswith("no-") else [f"--{key}"]), []  # for its error as an unknown key
    if not is_subcommand:
        return ([f"--no-{key}"] if _is_boolean(key, schema) else []), []
    if described.get("default") is False:
        return [], []
    written = f"no-{key.replace('_', '-')}"
    problem = f"`vllm serve` drops {key}: false, and the default stays: its top-level parser knows no --{written}"
    return [], [Finding("dropped-key", WARNING, key, problem, f"write {written}: true")]
