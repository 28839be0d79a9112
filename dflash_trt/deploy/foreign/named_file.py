# SPDX-License-Identifier: Apache-2.0
"""Argument files that a command names: written by its script or ConfigMap, or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_trt.deploy.finding import UNCHECKED, Finding
from dflash_trt.deploy.script import Server
from dflash_trt.errors import ConfigError, cut, shown
from dflash_trt.files.command import quoted
from dflash_trt.files.read import is_file, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES, yaml_document

ENV_FILE = "--env-file"
ARGUMENT_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
UNOPENED = "unopened-file"
"""Rule of the finding for an argument file that was not read."""


def named_text(name: str, files: Mapping[str, str], script: Path) -> str | None:
    """Text of the file that a command in `script` names; None where it lies in a place that is not opened.

    `files` are texts that come with the command, those of a ConfigMap by their base names. Nothing outside the folder
    of the script is opened. Raises ConfigError for a file that should be in that folder and is not, or is too large.
    """
    if (text := files.get(name, files.get(PurePosixPath(name).name))) is not None:
        return text
    path = script.parent / name
    if not _is_below(path, script.parent):
        return None
    if not is_file(str(path)):
        raise ConfigError(
            f"{script} names {shown(name)}, which is not beside it",
            hint=f"put it there, or check it alone: dflash-trt serve-config --check {quoted(Path(name))}",
        )
    return read_text(path, ConfigError, limit=MAX_BYTES)


def named_arguments(name: str, files: Mapping[str, str], script: Path) -> dict[str, Any] | Finding:
    """The mapping in an argument file, or the finding that it was not opened; ConfigError if it has no mapping."""
    if "$" in name:
        problem = f"the arguments in {cut(name)}, which the shell names that runs it, and all rules that depend on them"
        return Finding(UNOPENED, UNCHECKED, "config", problem, "write its name into the command")
    text = named_text(name, files, script)
    if text is None:
        problem = f"the arguments in {name}, outside the folder of {script.name}, and all rules that depend on them"
        fix = f"copy it beside {script.name} and name it there, or check it alone"
        return Finding(UNOPENED, UNCHECKED, "config", problem, fix)
    document = yaml_document(text, Path(name), ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: expected a mapping of arguments, found {shown(document)}")
    return document


def unread_files(server: Server, document: dict[str, Any]) -> Iterator[Finding]:
    """Files that a command names and that are not opened: of variables, and values of arguments that are no model."""
    words = [str(word) for word in server.command]
    named = [*server.sourced, *(after for word, after in pairwise(words) if word == ENV_FILE)]
    named += [word.partition("=")[2] for word in words if word.startswith(f"{ENV_FILE}=")]
    for name in named:
        problem = f"variables that {cut(name)} sets"
        yield Finding("unread-file", UNCHECKED, "environment", problem, "write what the command uses into the file")
    for key, value in document.items():
        if isinstance(value, str) and value.endswith(ARGUMENT_SUFFIXES):
            yield Finding("unread-file", UNCHECKED, str(key), f"what is in {cut(value)}", "look at it by hand")


def _is_below(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
        return False
