# SPDX-License-Identifier: Apache-2.0
"""Parsers that divide answers into reasoning, tool calls and text; without them a server returns raw text.

Sources: SGLang 0.5.23's detectors (its wheel), vLLM's model recipes and TensorRT-LLM's tool_parser_factory.py;
trtllm-serve reads gpt-oss's Harmony format on its own. Dynamo's frontend has parsers of its own: ai-dynamo/dynamo,
docs/fern/reasoning and tool-calling at cdf9267d, names as in ai-dynamo 1.6.1.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.schema import Runtime
from dflash_trt.files.json_file import package_data

Owner = Runtime | Literal["dynamo"]


class Parsers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parser names of a family of targets, by runtime."""

    prefixes: tuple[str, ...] = ()
    """Beginnings of a family's repository ids; the owner does not count, since copies have others."""
    reasoning: dict[Owner, str] = {}
    tool: dict[Owner, str] = {}


@cache
def _known() -> tuple[Parsers, ...]:
    return package_data(DATA / "parsers.json", tuple[Parsers, ...])


def target_parsers(target: str) -> Parsers:
    """Parsers of a target by the family that its name shows, a repository's or a directory's; empty for others.

    config.json does not suffice: Qwen3-Coder's chat template differs from Qwen3's, but its model_type does not.
    """
    name = Path(target).name.lower()
    families = ((entry, tuple(Path(prefix).name.lower() for prefix in entry.prefixes)) for entry in _known())
    return next((entry for entry, beginnings in families if name.startswith(beginnings)), Parsers())


def missing_parsers(target: str, runtime: Runtime) -> str:
    """A note that a runtime would return reasoning and tool calls as plain text; empty if it would not."""
    parsers = target_parsers(target)
    if parsers.prefixes and (runtime in parsers.reasoning or runtime in parsers.tool or runtime == "trtllm"):
        return ""
    return (
        f"no parsers are known for {target} under {runtime}: reasoning and tool calls come as plain text; a copy of a"
        " known target needs its repository's name as the directory's"
    )
