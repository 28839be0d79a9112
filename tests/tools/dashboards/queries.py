# SPDX-License-Identifier: Apache-2.0
"""The PromQL in docs/dashboards, read with Prometheus's grammar."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import yaml

from tests.paths import REPOSITORY

DIRECTORY = REPOSITORY / "docs" / "dashboards"
VARIABLES = {"$__rate_interval": "5m", "$plain_ms": "NaN", "$model": ".*", "$instance": ".*"}


def dashboard(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return document


def rules(name: str) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DIRECTORY / f"{name}.rules.yaml").read_text())["groups"]
    members: list[dict[str, Any]] = group["rules"]
    return members


def expressions(name: str) -> list[str]:
    """Queries of all panels and alerts, with Grafana's variables filled in."""
    found = [target["expr"] for panel in dashboard(name)["panels"] for target in panel.get("targets", ())]
    for variable, value in VARIABLES.items():
        found = [expression.replace(variable, value) for expression in found]
    return found + [rule["expr"] for rule in rules(name)]


def selectors(expression: str) -> list[Any]:
    """The selectors of series in `expression`; raises ValueError where it is no PromQL."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def metrics(name: str) -> set[str]:
    return {selector.name for expression in expressions(name) for selector in selectors(expression)}
