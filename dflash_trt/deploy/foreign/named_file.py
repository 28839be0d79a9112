# SPDX-License-Identifier: Apache-2.0
"""Argument files that a command names: written by its script or ConfigMap, or beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_trt.deploy.finding import UNCHECKED, Finding
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.command import quoted
from dflash_trt.files.read import is_file, read_text
from dflash_trt.files.strict_yaml import MAX_BYTES, yaml_document

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
    text = named_text(name, files, script)
    if text is None:
        problem = f"the arguments in {name}, outside the folder of {script.name}, and all rules that depend on them"
        fix = f"copy it beside {script.name} and name it there, or check it alone"
        return Finding(UNOPENED, UNCHECKED, "config", problem, fix)
    document = yaml_document(text, Path(name), ConfigError)
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: expected a mapping of arguments, found {shown(document)}")
    return document


def _is_below(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
        return False
