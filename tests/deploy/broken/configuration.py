# SPDX-License-Identifier: Apache-2.0
"""Configurations that are broken, and what a check finds in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.deploy.checker import check, file_config
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.render import command_text
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.deploy.broken.case import REMOVED, Case
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
    return check(file_config(file, schema, gpus=gpus, target="openai/gpt-oss-120b", draft=draft))
