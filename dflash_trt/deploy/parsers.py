# SPDX-License-Identifier: Apache-2.0
"""Names of the parsers that divide a target's answers into reasoning, tool calls and text, by runtime.

Without them a server returns raw text. Sources: SGLang 0.5.23's detectors (its wheel), vLLM's model recipes and
TensorRT-LLM's tool_parser_factory.py; trtllm-serve reads gpt-oss's Harmony format on its own. Dynamo's frontend has
parsers of its own: ai-dynamo/dynamo, docs/fern/reasoning and tool-calling at cdf9267d, names as in ai-dynamo 1.6.1.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json

Owner = Runtime | Literal["dynamo"]


class Parsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parser names of a family of targets, by runtime."""

    prefixes: tuple[str, ...] = ()
    """Prefixes of repository ids."""
    reasoning: dict[Owner, str] = {}
    tool: dict[Owner, str] = {}


@cache
def _known() -> tuple[Parsers, ...]:
    return read_json(DATA / "parsers.json", tuple[Parsers, ...], ConfigError, what="the package's data")


def target_parsers(target: str) -> Parsers:
    """Parsers of a target's repository id; empty for an unknown target."""
    return next((entry for entry in _known() if target.startswith(entry.prefixes)), Parsers())
