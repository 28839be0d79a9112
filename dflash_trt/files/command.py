# SPDX-License-Identifier: Apache-2.0
"""Command lines to copy, with values quoted so that none becomes an option or a second command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.errors import ConfigError, shown

OPTION = re.compile(r"-(?!\d)")  # -1 is a number


def argument(value: object, what: str) -> str:
    """`value` as a word of a command; ConfigError, naming `what`, for option-like words and control characters."""
    text = plain(str(value), what)
    if OPTION.match(text):
        raise ConfigError(
            f"{what}: expected a value that does not begin with a dash, found {shown(text)}: a command would take it"
            " for an option",
            hint="write a directory as ./-NAME",
        )
    return text


def plain(text: str, what: str) -> str:
    """`text` itself; ConfigError, naming `what`, for characters that control a terminal or a shell script."""
    if not text.isprintable():
        raise ConfigError(f"{what}: expected printable characters, found {shown(text)}", hint="rename it")
    return text


def command_line(words: Iterable[object]) -> str:
    """The words, quoted for a shell where necessary; ConfigError for control characters."""
    return shlex.join(plain(str(word), "a command") for word in words)


def file_word(path: Path) -> str:
    """A path as a word of a command that no program takes for an option; ConfigError for control characters."""
    return plain(f"./{path}" if str(path).startswith("-") else str(path), "-o")


def quoted(path: Path) -> str:
    """A path, quoted for the hint of an error; errors make their text printable themselves."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
