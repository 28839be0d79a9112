# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor URL --passive` and `doctor --prometheus URL`: a server's own traffic, without prompts."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.diagnosis_tables import checks_table, conclusion, findings_lines
from dflash_trt.observe.endpoints.client import Client, read_api_key
from dflash_trt.observe.endpoints.counter_names import COUNTER_NAMES
from dflash_trt.observe.endpoints.identify import ServerKind, identify
from dflash_trt.observe.traffic.judge_traffic import judge
from dflash_trt.observe.traffic.traffic import Traffic, traffic_of
from dflash_trt.observe.traffic.traffic_report import TrafficReport, read_earlier, tables
from dflash_trt.observe.traffic.window import scraped_kind, watched, window
from dflash_trt.runtime.progress_display import progress_line

SECONDS = 60.0
WINDOW, AGO = "1h", "1d"
GRACE_SECONDS = 30.0  # for the requests beside the wait


def watch_endpoint(
    url: str, as_json: bool, *, model: str | None, api_key_file: Path | None, baseline: Path | None,
    expect_tau: float | None, seconds: float | None,
) -> None:  # fmt: skip
    """Reads the counters of `url` twice; raises EndpointError where something is wrong, or could not be measured."""
    earlier, seconds = None if baseline is None else read_earlier(baseline), seconds or SECONDS
    client = Client(url, api_key=read_api_key(api_key_file), deadline_seconds=seconds + GRACE_SECONDS)
    with client, progress_line(f"reading the counters of {url} twice, {seconds:.0f} s apart"):
        kind = identify(client, model=model).kind
        if kind not in COUNTER_NAMES:
            raise EndpointError(
                f"{client.url} publishes no counters of its traffic that are known",
                hint="give the address of the engine behind it",
            )
        now = traffic_of(watched(client, COUNTER_NAMES[kind], seconds), kind, model)
    _conclude(client.url, kind, now, earlier, expect_tau, as_json=as_json)


def watch_prometheus(
    url: str, as_json: bool, *, model: str | None, api_key_file: Path | None, expect_tau: float | None, match: str,
    window_length: str | None, against: str | None,
) -> None:  # fmt: skip
    """Compares the last window that the Prometheus at `url` has with the one that ended `against` ago."""
    length, ago = window_length or WINDOW, against or AGO
    client = Client(url, api_key=read_api_key(api_key_file))
    with client, progress_line(f"asking Prometheus at {url}"):
        kind = scraped_kind(client, match)
        names = COUNTER_NAMES[kind]
        now = traffic_of(window(client, names, match, length), kind, model)
        before = window(client, names, match, length, ago)
        earlier = traffic_of(before, kind, model) if before.growth.has(names.output_tokens) else None
    _conclude(client.url, kind, now, earlier, expect_tau, as_json=as_json)


def _conclude(
    url: str, kind: ServerKind, now: Traffic, earlier: Traffic | None, expect_tau: float | None, *, as_json: bool
) -> None:
    verdict = judge(kind, now, earlier, expect_tau)
    report = TrafficReport(url=url, runtime=kind, now=now, earlier=earlier, **msgspec.structs.asdict(verdict))
    if as_json:
        print_json("doctor-passive", msgspec.to_builtins(report))
    else:
        print_tables([*tables(report), checks_table(report.checks)])
        for line in findings_lines(report.notes, report.unmeasured, report.findings):
            click.echo(line)
        click.echo(f"\n{conclusion(report.checks, report.findings)}")
    if found := [*report.findings, *report.unmeasured]:
        names = "; ".join(finding.name for finding in found)
        raise EndpointError(f"{url}: {names}", hint="doctor URL asks an idle server for the cause")
