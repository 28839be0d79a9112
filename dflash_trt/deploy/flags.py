# SPDX-License-Identifier: Apache-2.0
"""Command lines of vLLM and SGLang: arguments to text, and text back to arguments."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dflash_trt.deploy.schema import Schema
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import argument, command_line
from dflash_trt.files.json_file import json_document

# Commands that start a server; the first of each is written.
PROGRAMS = {
    "vllm": (["vllm", "serve"],),
    "sglang": (
        ["python", "-m", "sglang.launch_server"],
        ["python3", "-m", "sglang.launch_server"],
        ["sglang", "serve"],
    ),
}
POSITIONAL = {"vllm": "model_tag"}
NEGATABLE = {"vllm"}  # every switch has a --no- form; SGLang's have none


def command_text(runtime: str, arguments: dict[str, Any]) -> str:
    """The command, one argument a line; ConfigError for a value that it would not take as one."""
    lines = [command_line([*PROGRAMS[runtime][0], *(argument(arguments[key], key) for key in _positional(runtime))])]
    for key, value in arguments.items():
        if key not in _positional(runtime) and (text := _flag(runtime, key, value)):
            lines.append(text)
    return " \\\n  ".join(lines) + "\n"


def flag_words(runtime: str, arguments: dict[str, Any]) -> list[str]:
    """The arguments as the words of flags."""
    return [word for key, value in arguments.items() for word in shlex.split(_flag(runtime, key, value))]


def _positional(runtime: str) -> list[str]:
    return [POSITIONAL[runtime]] if runtime in POSITIONAL else []


def _flag(runtime: str, key: str, value: object) -> str:
    name = f"--{key.replace('_', '-')}"
    if value is True:
        return name
    if value is False:
        return f"--no-{name[2:]}" if runtime in NEGATABLE else ""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return command_line([name, argument(text, key)])


def is_command(text: str, runtime: str) -> bool:
    """Whether a file holds a command line of `runtime` rather than a YAML mapping."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return any(first.split()[: len(program)] == program for program in PROGRAMS[runtime])


def parse_command(text: str, schema: Schema) -> dict[str, Any]:
    """The arguments of a command line by name; values that the schema calls numbers or mappings are read as such."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    program = next(p for p in PROGRAMS[schema.runtime] if words[: len(p)] == p)
    words = words[len(program) :]
    start = next((i for i, word in enumerate(words) if _is_flag(word)), len(words))
    arguments: dict[str, Any] = {key: words[0] for key in _positional(schema.runtime) if start > 0}
    while start < len(words):
        flag, is_joined, joined = words[start].partition("=")
        end = next((i for i in range(start + 1, len(words)) if _is_flag(words[i])), len(words))
        name, value = _read_flag(flag, [joined] if is_joined else words[start + 1 : end], schema)
        arguments[name] = value
        start = end
    return arguments


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def normalize(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Names as in Python, and the first of several: `max-model-len` is max_model_len."""
    names = schema.names()
    keys = {key: str(key).lstrip("-").replace("-", "_") for key in document}
    return {names.get(keys[key], keys[key]): value for key, value in document.items()}


def _read_flag(flag: str, values: list[str], schema: Schema) -> tuple[str, Any]:
    names = schema.names()
    key = flag.lstrip("-").replace("-", "_")
    name = names.get(key, key)
    if not values:
        is_negated = key not in names and key.startswith("no_") and key[3:] in names
        return (names[key[3:]], False) if is_negated else (name, True)
    described = schema.properties().get(name, {})
    types = described.get("type", [])
    if len(values) > 1 or ("array" in types and "string" not in types):
        return name, [_read_value(value, described.get("items", {})) for value in values]
    return name, _read_value(values[0], described)


def _read_value(text: str, described: dict[str, Any]) -> Any:
    if "type" not in described or "string" in described["type"]:
        return text
    try:
        return json_document(text.encode(), "value", ConfigError)
    except ConfigError:  # then it is a word, and the schema says whether that is one of its choices
        return text
