# SPDX-License-Identifier: Apache-2.0
"""Words of a command line as arguments, read as the parsers of vLLM and SGLang do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from dflash_trt.deploy.command_text import NEGATABLE, positional_keys
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.schema import Schema, renamed_flags
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import json_document

MAX_SHORT = 3  # letters of names with one dash, in vLLM


def parse_arguments(words: list[str], schema: Schema) -> tuple[dict[str, Any], list[Finding]]:
    """Arguments by name, read as argparse and vLLM's parser do, and findings for what is not what it seems.

    A unique prefix stands for a flag, `--no-x` for x false, `--config.key value` for a key of a JSON argument: all of
    its dotted keys replace one that is given as a whole. Numbers, mappings and lists are read as the schema calls for
    them.
    """
    arguments: dict[str, Any] = {}
    findings: list[Finding] = []
    dotted: dict[str, Any] = {}
    positional: list[str] = []
    for start, end in _groups(words):
        if not _is_flag(words[start]):
            positional += words[start:end]
        elif words[start] != "--":
            is_dotted = "." in words[start].partition("=")[0]
            read = dotted if is_dotted else arguments
            positional += _read_group(words[start:end], schema, read, findings)
    for key in dotted.keys() & arguments.keys():
        problem = f"its dotted keys ({', '.join(dotted[key])}) replace the value that is given as a whole"
        findings.append(Finding("replaced", WARNING, key, problem, "give all of its keys in one way"))
    arguments |= dotted
    for key, word in zip(positional_keys(schema.runtime), positional, strict=False):
        arguments = {key: word, **arguments}
    findings += map(_surplus, positional[len(positional_keys(schema.runtime)) :])
    return arguments, findings


def _surplus(word: str) -> Finding:
    """The finding for a word that is neither a flag nor its value."""
    if word.startswith(("$", "`")):
        problem = f"{word} is known only to the shell that runs it, and may be arguments"
        return Finding("variable", UNCHECKED, word, problem, "write its value, or set it in the script")
    problem = "expected a flag or its value, found a word that is neither"
    return Finding("unknown-key", ERROR, word, problem, "quote values of several words")


def argument_words(words: list[str], schema: Schema) -> Iterator[tuple[str, int, int]]:
    """Each argument that a flag gives, by its key, with its first word and the one past its last."""
    for start, end in _groups(words):
        arguments: dict[str, Any] = {}
        if _is_flag(words[start]) and words[start] != "--":
            others = _read_group(words[start:end], schema, arguments, [])
            yield from ((key, start, end - len(others)) for key in arguments)


def _groups(words: list[str]) -> Iterator[tuple[int, int]]:
    """Bounds of each flag with the words up to the next, and of the words before the first."""
    starts = [0, *(index for index, word in enumerate(words) if index and _is_flag(word))]
    yield from pairwise([*starts, len(words)] if words else [])


def _read_group(words: list[str], schema: Schema, arguments: dict[str, Any], findings: list[Finding]) -> list[str]:
    """Add the argument of a flag, the first word, and return the words that are not its values."""
    flag, is_joined, joined = words[0].partition("=")
    if not is_joined:
        return _read_flag(flag, words[1:], schema, arguments, findings)
    return _read_flag(flag, [joined], schema, arguments, findings) + words[1:]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _read_flag(
    flag: str, values: list[str], schema: Schema, arguments: dict[str, Any], findings: list[Finding]
) -> list[str]:
    """Add one argument, and return the words after it that are not its values."""
    level = re.fullmatch("-O([0-9]+)", flag)
    if level is not None:
        arguments["optimization_level"] = int(level[1])
        return values
    outer, *inner = flag.lstrip("-").split(".")
    name, is_negated = _name(outer.replace("-", "_"), schema, findings, is_long=flag.startswith("--"))
    if not name:
        return values[1:]
    described = schema.properties().get(name, {})
    types = described.get("type", [])
    if values and "$" in values[0] and types and "string" not in types:
        problem = f"{values[0]} is known only to the shell that runs it"
        findings.append(Finding("variable", UNCHECKED, name, problem, "write its value, or set it in the script"))
        return values[1:]
    if inner:
        _set_inner(arguments, [name, *(part.replace("-", "_") for part in inner)], values)
        return values[1:]
    if is_negated or ("boolean" in types and not _is_boolean(values[:1])):
        arguments[name] = not is_negated
        return values
    if not values:
        arguments[name] = True
        return []
    is_known = name in schema.properties()
    is_list = "array" in types and ("string" not in types or len(values) > 1)
    if is_list or (len(values) > 1 and not is_known):
        arguments[name] = [_read_value(value, described.get("items", {})) for value in values]
        return []
    arguments[name] = _read_value(values[0], described)
    return values[1:]


def _is_boolean(values: list[str]) -> bool:
    return [value.lower() for value in values] in (["true"], ["false"])


def _set_inner(arguments: dict[str, Any], path: list[str], values: list[str]) -> None:
    """`--speculative-config.method dflash`; a `+` after the last key adds to a list."""
    *outer, last = path
    place = arguments
    for key in outer:
        inner = place.setdefault(key, {})
        place = inner if isinstance(inner, dict) else place.setdefault(f"{key}.", {})
    value = _read_value(values[0], {"type": "object"}) if values else True
    if last.endswith("+"):
        added = value if isinstance(value, list) else str(value).split(",") if values else [value]
        place[last[:-1]] = [*(place.get(last[:-1]) or []), *added]
    else:
        place[last] = value


def _name(key: str, schema: Schema, findings: list[Finding], *, is_long: bool) -> tuple[str, bool]:
    """Name of a flag, and whether it is negated; a unique prefix as argparse reads it, else the flag itself."""
    names = schema.names()
    is_short = schema.runtime == "vllm" and len(key) <= MAX_SHORT and names.get(key, key) != key
    if key in names and not (is_short and is_long):
        return names[key], False
    can_negate = schema.runtime in NEGATABLE
    if can_negate and (positive := _negated(key, schema)) is not None:
        return positive, True
    if renamed_flags().successor(schema.runtime, key) is not None:  # it may begin the names of several others
        return key, False
    if is_short:
        problem = f"expected -{key}, found --{key}, which the runtime does not know"
        findings.append(Finding("unknown-key", ERROR, key, problem, f"write -{key}"))
        return "", False
    options = {
        name: (target, False) for name, target in names.items() if name.startswith(key) and len(name) > MAX_SHORT
    }
    if can_negate and key.startswith("no_"):
        options |= {name: (target, True) for name, target in names.items() if name.startswith(key[3:])}
    meant = set(options.values())
    if len(meant) == 1 and is_long:
        rest = min(options, key=len)[len(key) :]
        if rest.startswith("_") and rest.count("_") > 1:  # more than a -size or -path: perhaps another argument
            problem = f"expected a whole name, found a beginning that the runtime reads as {min(options, key=len)}"
            findings.append(Finding("abbreviated", WARNING, key, problem, "write the argument that is meant"))
        return meant.pop()
    if len(meant) > 1 and is_long:
        listed = ", ".join(sorted(target for target, _ in meant)[:4])
        problem = f"expected one argument, found the beginning of several ({listed}), which the runtime refuses"
        findings.append(Finding("ambiguous", ERROR, key, problem, "write the whole name"))
        return "", False
    return key, False


def is_argument(key: str, schema: Schema) -> bool:
    """Whether a key of a file is the name of an argument, or the negated one of a switch."""
    name = key.lstrip("-").replace("-", "_")
    return name in schema.names() or (schema.runtime in NEGATABLE and _negated(name, schema) is not None)


def _negated(key: str, schema: Schema) -> str | None:
    """The switch that a key turns off: no_x, or disable_x for enable_x and the reverse (vLLM's EnableDisableAction)."""
    names = schema.names()
    for prefix, positive in (("no_", ""), ("disable_", "enable_"), ("enable_", "disable_")):
        name = names.get(positive + key.removeprefix(prefix)) if key.startswith(prefix) else None
        if name is not None and (not positive or "boolean" in schema.properties()[name].get("type", [])):
            return name
    return None


def _read_value(text: str, described: dict[str, Any]) -> Any:
    if "type" not in described or "string" in described["type"]:
        return text
    with suppress(ValueError):
        return float(text) if text[:1] == "." and described["type"] == "number" else int(text)
    try:
        return json_document(text.encode(), "value", ConfigError)
    except ConfigError:  # a word, which the schema compares with its choices
        return text
