# SPDX-License-Identifier: Apache-2.0
"""A dashboard as Grafana imports it: schema version 39, Grafana 10.1 and later."""

from __future__ import annotations

from typing import Any

from tools.dashboards.panels import ROWS, Panel
from tools.dashboards.runtimes import MODEL, Runtime

Json = dict[str, Any]
WIDTH, HEIGHT = 12, 8
"""Size of a panel in Grafana's grid of 24 columns."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = 'model_name=~"$model",instance=~"$instance"'
# Okabe and Ito's colours, which colour-blind people tell apart; black and yellow are left out for Grafana's themes.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def dashboard(name: str, runtime: Runtime) -> Json:
    """The dashboard of one runtime."""
    panels: list[Json] = []
    top = 0
    for row, members in ROWS.items():
        shown = [panel for panel in members if _queries(panel, runtime)]
        if not shown:
            continue
        panels.append(_row(row, len(panels) + 1, top))
        for index, panel in enumerate(shown):
            place = {"h": HEIGHT, "w": WIDTH, "x": index % 2 * WIDTH, "y": top + 1 + index // 2 * HEIGHT}
            panels.append(_panel(panel, runtime, len(panels) + 1, place))
        top += 1 + (len(shown) + 1) // 2 * HEIGHT
    return {
        "uid": f"dflash-trt-{name.replace('_', '-')}",
        "title": f"DFlash: {runtime.title}",
        "description": f"Speculative decoding with a DFlash drafter. Metric names: {runtime.source}.",
        "tags": ["dflash"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(runtime)},
        "panels": panels,
    }


def _variables(runtime: Runtime) -> list[Json]:
    metric = runtime.running.partition("(")[2].partition("(")[2].partition("{")[0]

    def labels(name: str, label: str, title: str) -> Json:
        query = f"label_values({metric}, {label})"
        return {
            "type": "query", "name": name, "label": title, "datasource": DATASOURCE, "query": query, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": ".*", "sort": 1,
            "current": {"text": "All", "value": "$__all", "selected": True},
        }  # fmt: skip

    return [
        {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
        labels("model", "model_name", "Model"),
        labels("instance", "instance", "Server"),
        # NaN is a number in PromQL: the panel that uses it stays empty, with the reason, until the value is set.
        {
            "type": "textbox", "name": "plain_ms", "label": "ms per token without speculation", "query": "NaN",
            "current": {"text": "NaN", "value": "NaN", "selected": True},
        },
    ]  # fmt: skip


def _queries(panel: Panel, runtime: Runtime) -> list[tuple[str, str]]:
    return [(legend, expression) for legend, expression in panel.queries(runtime) if expression]


def _row(title: str, number: int, top: int) -> Json:
    place = {"h": 1, "w": 24, "x": 0, "y": top}
    return {"type": "row", "id": number, "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, runtime: Runtime, number: int, place: dict[str, int]) -> Json:
    queries = _queries(panel, runtime)
    labels = runtime.engine if panel.is_by_engine else MODEL
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.threshold is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.threshold}]
    custom = {
        "lineWidth": 2,
        "showPoints": "never",
        "spanNulls": False,
        "thresholdsStyle": {"mode": "off" if panel.threshold is None else "dashed"},
    }
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [_target(letter, labels, *query) for letter, query in zip("ABCDEF", queries, strict=False)],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "decimals": 2 if panel.unit == "none" and panel.title != "Requests" else None,
                "color": {"mode": "palette-classic"},
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [_coloured(legend, index) for index, (legend, _) in enumerate(queries) if "{{" not in legend],
        },
        "options": {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["mean", "lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _target(letter: str, labels: str, legend: str, expression: str) -> Json:
    expression = (
        expression.replace("SELECTOR", SELECTOR).replace("LABELS", labels).replace("WINDOW", "$__rate_interval")
    )
    return {"refId": letter, "datasource": DATASOURCE, "expr": expression, "legendFormat": legend, "range": True}


def _coloured(legend: str, index: int) -> Json:
    colour = {"id": "color", "value": {"mode": "fixed", "fixedColor": PALETTE[index % len(PALETTE)]}}
    return {"matcher": {"id": "byName", "options": legend}, "properties": [colour]}
