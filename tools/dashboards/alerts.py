# SPDX-License-Identifier: Apache-2.0
"""Alert rules as Prometheus loads them (`rule_files:`)."""

from __future__ import annotations

from typing import Any

from tools.dashboards.panels import ALERTS, Alert
from tools.dashboards.runtimes import MODEL, Runtime

WINDOW = "30m"


def rules(name: str, runtime: Runtime) -> dict[str, Any]:
    """The rule file of one runtime."""
    members = [_rule(alert, runtime) for alert in ALERTS if alert.expression(runtime)]
    return {"groups": [{"name": f"dflash-{name.replace('_', '-')}", "rules": members}]}


def _rule(alert: Alert, runtime: Runtime) -> dict[str, Any]:
    labels = runtime.engine if alert.is_by_engine else MODEL
    expression = alert.expression(runtime).replace("{SELECTOR,", "{").replace("{SELECTOR}", "")
    expression = expression.replace("LABELS", labels)
    subject = " ".join(f"{{{{ $labels.{label} }}}}" for label in labels.split(", "))
    return {
        "alert": f"DFlash{alert.name}",
        "expr": expression.replace("WINDOW", WINDOW),
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": f"{subject}: {alert.summary}", "description": alert.description},
    }
