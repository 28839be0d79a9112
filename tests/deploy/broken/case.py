# SPDX-License-Identifier: Apache-2.0
"""A deliberately broken configuration, and what a check finds in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dflash_trt.deploy.checker import check, file_configs
from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.render import command_text
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.deploy.deployments import rendered


def changed(runtime: Runtime, change: dict[str, Any]) -> dict[str, Any]:
    """A good configuration with some keys set or removed."""
    document = copy.deepcopy(rendered("gpt-oss-120b.h200x8.latency", runtime).arguments)
    for path, value in change.items():
        *outer, last = path.split(".")
        place = document
        for key in outer:
            place = place[key]
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    return document


def checked(tmp_path: Path, document: dict[str, Any], case: Case, draft: str | None = None) -> list[Finding]:
    """What a check finds in that configuration as a file, a command line for vLLM and SGLang."""
    schema = load_schema(case.runtime, case.version)
    file = tmp_path / "config"
    is_trtllm = case.runtime == "trtllm"
    file.write_text(yaml.safe_dump(document) if is_trtllm else command_text(case.runtime, document))
    gpus = parse_gpus(case.gpus, "--gpus")
    return check(file_configs(file, schema, gpus=gpus, target="openai/gpt-oss-120b", draft=draft)[0])


REMOVED = object()
SPEC = "speculative_config"


class Case(msgspec.Struct, frozen=True):
    """One change of a good configuration, and what must be said about it."""

    rule: str = ""
    change: dict[str, Any] = {}
    """By dotted path."""
    words: str = ""
    key: str = ""
    """By default the only key of `change`."""
    runtime: Runtime = "trtllm"
    gpus: str = "h200x8"
    version: str | None = None
    severity: str = ERROR
    also: tuple[str, ...] = ()
    """Other rules that refuse the same change."""

    @property
    def found_at(self) -> str:
        """Where the finding is."""
        return self.key or next(iter(self.change))
