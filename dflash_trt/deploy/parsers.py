# SPDX-License-Identifier: Apache-2.0
"""What divides a target's answers into reasoning, tool calls and text, by each runtime's own name for it.

Without them a server returns raw text. Names: SGLang 0.5.23's detectors (its wheel), vLLM's model recipes and
TensorRT-LLM's tool_parser_factory.py; trtllm-serve reads gpt-oss's Harmony format on its own.
"""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json


class Parsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a family of targets, by runtime."""

    prefixes: tuple[str, ...] = ()
    """Of repository ids."""
    reasoning: dict[Runtime, str] = {}
    tool: dict[Runtime, str] = {}


@cache
def _known() -> tuple[Parsers, ...]:
    return read_json(DATA / "parsers.json", tuple[Parsers, ...], ConfigError, what="the package's data")


def target_parsers(target: str) -> Parsers:
    """Those of a target, by its repository id; none for one that is not known."""
    return next((entry for entry in _known() if target.startswith(entry.prefixes)), Parsers())
