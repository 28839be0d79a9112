# SPDX-License-Identifier: Apache-2.0
"""A judged window: the document, which is the baseline of later ones, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.diagnosis.checks import Check, EndpointFinding
from dflash_trt.observe.endpoints.identify import ServerKind
from dflash_trt.observe.pages.page_templates import Table
from dflash_trt.observe.traffic.traffic import Traffic

SCHEMA = "dflash-trt/doctor-passive/1"
HINT = "dflash-trt doctor URL --passive --json > before.json, while the server is well"
SHOWN_POSITIONS = 16


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """A window, the one before, and what they tell."""

    schema: str = SCHEMA
    url: str
    runtime: ServerKind
    now: Traffic
    earlier: Traffic | None
    checks: list[Check]
    findings: list[EndpointFinding]
    """Faults."""
    unmeasured: list[EndpointFinding]
    """Checks that could not be made, but can be after a change."""
    notes: list[EndpointFinding]


def read_earlier(file: Path) -> Traffic:
    """The window of an earlier report; raises ConfigError for any other file."""
    report = read_json(file, TrafficReport, ConfigError, what="a passive diagnosis", hint=HINT)
    if report.schema != SCHEMA:
        raise ConfigError(f"{file} has the schema {report.schema}, this release reads {SCHEMA}", hint=HINT)
    if report.findings:
        raise ConfigError(f"{file} is no baseline: something was wrong ({report.findings[0].name})", hint=HINT)
    return report.now


def tables(report: TrafficReport) -> Iterator[Table]:
    """Acceptance of each engine, then the server's other figures beside the earlier ones."""
    title = f"traffic of {report.url} ({report.runtime}), {report.now.seconds:.0f} s, no prompts sent"
    columns = ("engine", "verify passes", "drafts a step", "acceptance length", "accepted at position 1, 2, ... in %")
    rows = [(each.engine or "all", *_figures(each.acceptance)) for each in report.now.engines]
    if len(rows) > 1:
        rows.append(("all", *_figures(report.now.acceptance)))
    if report.earlier is not None:
        rows.append(("before", *_figures(report.earlier.acceptance)))
    yield Table(title=title, columns=columns, rows=tuple(rows))
    if report.earlier is None:
        yield Table(title="server", columns=("figure", "now"), rows=tuple(_server(report.now)))
        return
    pairs = zip(_server(report.now), _server(report.earlier), strict=True)
    rows = [(name, now, before) for (name, now), (_, before) in pairs]
    yield Table(title="server", columns=("figure", "now", "before"), rows=tuple(rows))


def _figures(counts: Acceptance) -> tuple[str, ...]:
    passes, tau, length = counts.drafting_passes, counts.tau_of_drafting_passes, counts.draft_length
    shares = " ".join(f"{100 * accepted / passes:.0f}" for accepted in counts.accepted_by_position) if passes else ""
    return (
        str(passes),
        "-" if length is None else f"{length:.1f}",
        "-" if tau is None else f"{tau:.2f}",
        " ".join(shares.split()[:SHOWN_POSITIONS]) or "-",
    )


def _server(traffic: Traffic) -> Iterator[tuple[str, str]]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{value * 1e3:.1f} ms"

    yield "output tokens a second", f"{traffic.output_tokens / traffic.seconds:.0f}"
    yield "time per output token, mean", milliseconds(traffic.tpot_seconds)
    yield "time per output token, p95", milliseconds(traffic.tpot_p95_seconds)
    yield "KV cache in use", share(traffic.cache_use)
    yield "prefix cache hits", share(traffic.hit_rate)
    yield "preemptions", "-" if traffic.preemptions is None else f"{traffic.preemptions:.0f}"
    yield "waiting requests", "-" if traffic.waiting is None else f"{traffic.waiting:.1f}"
