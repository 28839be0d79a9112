# SPDX-License-Identifier: Apache-2.0
"""Prometheus's own rule tester on synthetic series: each alert fires where it should, and none on a healthy server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.dashboards.queries import DIRECTORY
from tests.tools.dashboards.series import MINUTES, PASSES, Series, server
from tools.dashboards.runtimes import RUNTIMES

HEALTHY = tuple(0.87**position for position in range(1, 16))
SHORT = (0.8, 0.6, 0.5, 0.4)
CLIFF = (0.9, 0.8, 0.7, 0.6, 0.5, 0.0, 0.0, 0.0)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus"),
]


def check(kind: str, folder: Path, series: Series, firing: dict[str, int], at: str = "60m", **more: Any) -> None:
    """Checks that only the alerts `firing` fire, each for this number of engines or models."""
    samples = [{"labels": f'{{alertname="DFlash{name}"}}', "value": count} for name, count in firing.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples,
        }],
    }  # fmt: skip
    file = folder / "test.yaml"
    rules = str(DIRECTORY / f"{kind}.rules.yaml")
    file.write_text(yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "1m", "tests": [test | more]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


kinds = pytest.mark.parametrize("kind", RUNTIMES)


@kinds
def test_healthy_servers(kind: str, tmp_path: Path) -> None:
    series = server(kind, HEALTHY) | server(kind, HEALTHY, instance="b")
    check(kind, tmp_path, series, {})
    check(kind, tmp_path, series, {}, at="5m")
    check(kind, tmp_path, server(kind, SHORT), {})  # four drafts: no sixth


@kinds
def test_drafts_that_are_shorter_than_their_series(kind: str, tmp_path: Path) -> None:
    """A schedule that drafts four tokens at this load, where eight have series."""
    check(kind, tmp_path, server(kind, (*SHORT, 0.0, 0.0, 0.0, 0.0), drafted=4), {})


@kinds
def test_one_server_that_accepts_nothing(kind: str, tmp_path: Path) -> None:
    series = server(kind, HEALTHY) | server(kind, (0.0,) * 15, instance="b") | server(kind, HEALTHY, instance="c")
    check(kind, tmp_path, series, {"AcceptanceNearZero": 1})


@pytest.mark.parametrize("kind", ["vllm", "dflash_trt"])
def test_one_engine_of_a_server_that_accepts_nothing(kind: str, tmp_path: Path) -> None:
    series = server(kind, HEALTHY) | server(kind, (0.0,) * 15, engine="1")
    check(kind, tmp_path, series, {"AcceptanceNearZero": 1})


@kinds
def test_a_cliff(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, server(kind, CLIFF), {} if kind == "sglang" else {"AcceptanceStopsAtPosition": 1})


@kinds
def test_a_server_without_a_drafter(kind: str, tmp_path: Path) -> None:
    """It publishes no series of drafts; the other server of the model drafts."""
    series = server(kind, HEALTHY) | server(kind, (), instance="b", has_drafter=False)
    check(kind, tmp_path, series, {"NoSpeculation": 1})


@kinds
def test_requests_that_wait_for_ten_minutes(kind: str, tmp_path: Path) -> None:
    series = server(kind, HEALTHY, waiting=f"0x29 3x{MINUTES - 30}")
    check(kind, tmp_path, series, {}, at="39m")
    check(kind, tmp_path, series, {"RequestsWait": 1}, at="41m")


@kinds
def test_acceptance_that_drifts_from_the_day_before(kind: str, tmp_path: Path) -> None:
    """A day of samples every ten minutes, then two hours in which each pass accepts a third less."""
    before, after = server(kind, HEALTHY), server(kind, tuple(share * 0.67 for share in HEALTHY))
    series = {}
    for name, values in before.items():
        if values.startswith("0x"):
            continue
        step, later = (float(text.partition("+")[2].partition("x")[0]) * 10 for text in (values, after[name]))
        series[name] = f"0+{step:g}x180 {step * 180 + later:g}+{later:g}x12"
    check(kind, tmp_path, series, {}, at="29h", interval="10m")
    check(kind, tmp_path, series, {"AcceptanceDrift": 1}, at="32h", interval="10m")


def test_few_passes_are_not_judged(tmp_path: Path) -> None:
    series = {
        name: values.replace(f"0+{PASSES}", "0+10") for name, values in server("vllm", (0.0,) * 15).items()
    }  # fmt: skip
    check("vllm", tmp_path, series, {})
