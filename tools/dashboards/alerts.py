# SPDX-License-Identifier: Apache-2.0
"""Alert rules as Prometheus loads them (`rule_files:`)."""

from __future__ import annotations

from typing import Any

from tools.dashboards.panels import ALERTS, Alert
from tools.dashboards.runtimes import Runtime

WINDOW = "30m"


def rules(name: str, runtime: Runtime) -> dict[str, Any]:
    """The rule file of one runtime."""
    members = [_rule(alert, runtime) for alert in ALERTS if alert.expression(runtime)]
    return {"groups": [{"name": f"dflash-{name.replace('_', '-')}", "rules": members}]}


def _rule(alert: Alert, runtime: Runtime) -> dict[str, Any]:
    expression = alert.expression(runtime).replace("{SELECTOR,", "{").replace("{SELECTOR}", "")
    return {
        "alert": f"DFlash{alert.name}",
        "expr": expression.replace("WINDOW", WINDOW),
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }
