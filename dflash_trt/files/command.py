# SPDX-License-Identifier: Apache-2.0
"""Command lines to copy: values are quoted and never become an option or a second command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.errors import ConfigError, shown

OPTION = re.compile(r"-(?!\d)")  # -1 is a number


def argument(value: object, what: str) -> str:
    """`value` as a word of a command; raises ConfigError for option-like words and control characters in `what`."""
    text = plain(str(value), what)
    if OPTION.match(text):
        raise ConfigError(
            f"{what}: expected a value that does not begin with a dash, found {shown(text)}: a command would take it"
            " for an option",
            hint="write a directory as ./-NAME",
        )
    return text


def plain(text: str, what: str) -> str:
    """`text` itself; ConfigError where it has characters that a terminal or a shell script would obey."""
    if not text.isprintable():
        raise ConfigError(f"{what}: expected printable characters, found {shown(text)}", hint="rename it")
    return text


def command_line(words: Iterable[object]) -> str:
    """Words, quoted for a shell where that is due; ConfigError for control characters in one."""
    return shlex.join(plain(str(word), "a command") for word in words)


def quoted(path: Path) -> str:
    """A path in the hint of an error, which makes it printable itself."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))
