# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alert rules are what the command writes, in PromQL over metrics of their runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.dashboards.queries import DIRECTORY, expressions, metrics, rules, selectors
from tools.dashboards.__main__ import files
from tools.dashboards.runtimes import RUNTIMES

PREFIXES = {"dflash_trt": "vllm:", "vllm": "vllm:", "sglang": "sglang:", "tensorrt_llm": "trtllm_"}


def test_committed_files_are_what_the_command_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tools.dashboards", str(tmp_path)], check=True, capture_output=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == files() == {path.name: path.read_text() for path in DIRECTORY.iterdir()}, "make dashboards"


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_query_is_promql_over_the_runtimes_metrics(name: str) -> None:
    assert len(expressions(name)) > 15
    for metric in metrics(name):
        assert metric.startswith(PREFIXES[name])
        assert not metric.endswith("_total_total")


@pytest.mark.parametrize("name", RUNTIMES)
def test_rules_have_prometheus_keys_and_say_what_to_do(name: str) -> None:
    members = rules(name)
    assert len({rule["alert"] for rule in members}) == len(members) >= 4
    for rule in members:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.model_name" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert all(selector.matchers is not None for selector in selectors(rule["expr"]))
