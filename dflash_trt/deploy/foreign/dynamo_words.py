# SPDX-License-Identifier: Apache-2.0
"""Flags of Dynamo's own among the arguments of its workers (`python -m dynamo.vllm`, dynamo.sglang, dynamo.trtllm)."""

from __future__ import annotations

from functools import cache

import msgspec

from dflash_trt.deploy.finding import UNCHECKED, Finding
from dflash_trt.deploy.gpus import DATA
from dflash_trt.deploy.script import Server
from dflash_trt.errors import cut
from dflash_trt.files.json_file import package_data

PREFIX = "dynamo."
READ = ("dyn_reasoning_parser", "dyn_tool_call_parser", "dyn_default_thinking_mode")
"""Flags that the rules `parsers` and `chat_mode` read."""


class _DynamoFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    flags: dict[str, frozenset[str]]
    """Names of flags, with underscores; `common` are those of all workers."""


@cache
def dynamo_flags(runtime: str) -> frozenset[str]:
    """The flags that Dynamo's worker of a runtime keeps for itself."""
    flags = package_data(DATA / "dynamo_flags.json", _DynamoFlags).flags
    return flags["common"] | flags[runtime]


def is_dynamo(server: Server) -> bool:
    """Whether Dynamo starts the server."""
    return server.program[-1].startswith(PREFIX)


def runtime_words(server: Server) -> tuple[list[str], list[Finding]]:
    """The words of a vLLM or SGLang worker without Dynamo's flags; a finding lists those that no rule reads."""
    kept, own = _divided(server)
    unread = [name for name in own if name not in READ]
    if not unread:
        return kept, []
    problem = f"flags of Dynamo 1.6.1's own: {cut(', '.join(unread))}"
    return kept, [Finding("dynamo", UNCHECKED, "dynamo", problem, "look them up in the documents of Dynamo")]


def dynamo_values(server: Server) -> dict[str, str] | None:
    """Values of Dynamo's own flags by their names with underscores; None where Dynamo does not start the server."""
    return _divided(server)[1] if is_dynamo(server) else None


def _divided(server: Server) -> tuple[list[str], dict[str, str]]:
    """The runtime's words, and the values of Dynamo's flags."""
    kept: list[str] = []
    own: dict[str, str] = {}
    flag = None
    for word in map(str, server.words):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flag = name if is_dynamo(server) and name.removeprefix("no_") in dynamo_flags(server.runtime) else None
            if flag is not None:
                own[flag] = value
        elif flag is not None:
            own[flag] = f"{own[flag]} {word}".strip()
        if flag is None:
            kept.append(word)
    return kept, own
