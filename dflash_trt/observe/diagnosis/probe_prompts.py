# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis asks: as chats, or as starts of texts where a server has no chat template."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.files.read import read_text

CONTINUE = "Continue this Python file.\n\n```python\n"


class ProbePrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chat: str
    """A user's message."""
    text: str
    """A completion's prompt."""


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name -> question."""

    short: dict[str, ProbePrompt]
    foreign: dict[str, ProbePrompt]


@cache
def prompts() -> Prompts:
    return read_json(Path(__file__).with_suffix(".json"), Prompts, ConfigError, what="the package's data")


def passage(index: int, count: int, num_characters: int) -> ProbePrompt:
    """Passage `index` of `count` of a long text."""
    text = _source()
    begin = index * max(0, len(text) - num_characters) // max(1, count)
    taken = text[begin : begin + num_characters]
    return ProbePrompt(f"{CONTINUE}{taken}", taken)


@cache
def _source() -> str:
    """A long text that every installation has: this package's own source code."""
    package = Path(__file__).parents[2]
    files = [file for room in ("checkpoint", "cli", "deploy") for file in sorted((package / room).glob("*.py"))]
    return "\n\n".join(read_text(file, ConfigError, limit=2**20) for file in files)
