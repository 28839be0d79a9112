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
    """The words of a vLLM or SGLang worker without Dynamo's flags, which a finding lists."""
    if not is_dynamo(server):
        return [*server.words], []
    kept: list[str] = []
    own: list[str] = []
    is_own = False
    for word in server.words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            is_own = name.removeprefix("no_") in dynamo_flags(server.runtime)
            own += [name] if is_own else []
        if not is_own:
            kept.append(word)
    if not own:
        return kept, []
    problem = f"flags of Dynamo 1.6.1's own: {cut(', '.join(own))}"
    return kept, [Finding("dynamo", UNCHECKED, "dynamo", problem, "look them up in the documents of Dynamo")]
