# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alert rules are what the command writes, and what Grafana and Prometheus read."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.tools.dashboards.queries import DIRECTORY, dashboard, expressions, metrics, rules, selectors
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


def test_what_is_no_promql_is_seen() -> None:
    with pytest.raises(ValueError, match="invalid promql"):
        selectors("rate(vllm:prompt_tokens_total[5m]) / ")


@pytest.mark.parametrize("name", RUNTIMES)
def test_queries_of_a_dashboard_follow_its_variables(name: str) -> None:
    variables = {variable["name"] for variable in dashboard(name)["templating"]["list"]}
    assert variables == {"datasource", "model", "instance", "plain_ms"}
    targets = [target["expr"] for panel in dashboard(name)["panels"] for target in panel.get("targets", ())]
    for expression in targets:
        assert "SELECTOR" not in expression
        assert "WINDOW" not in expression
        assert expression.count('model_name=~"$model",instance=~"$instance"') >= 1


@pytest.mark.parametrize("name", RUNTIMES)
def test_grafana_reads_every_key(name: str) -> None:
    """Its classes drop keys that they do not know: what comes back has all of ours."""
    ours = dashboard(name)
    back = json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(ours))), cls=JSONEncoder))
    assert list(lost(ours, back, "")) == []


def lost(ours: Any, back: Any, where: str) -> list[str]:
    """What is in `ours` and not, or other, in `back`; null is Grafana's word for absent."""
    if isinstance(ours, dict):
        pairs = [(f"{where}.{key}", value, (back or {}).get(key)) for key, value in ours.items()]
    elif isinstance(ours, list):
        pairs = [(f"{where}[{i}]", value, item) for i, (value, item) in enumerate(zip(ours, back or [], strict=True))]
    else:
        return [] if ours == back or ours is None else [where]
    return [name for path, value, item in pairs for name in lost(value, item, path)]


def test_a_misspelt_key_is_seen() -> None:
    ours = dashboard("vllm")
    ours["panels"][1]["gridpos"] = ours["panels"][1].pop("gridPos")
    back = json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(ours))), cls=JSONEncoder))
    assert lost(ours, back, "") == [f".panels[1].gridpos.{key}" for key in "hwxy"]


@pytest.mark.parametrize("name", RUNTIMES)
def test_panels_lie_beside_each_other(name: str) -> None:
    panels = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


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
