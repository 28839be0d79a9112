# SPDX-License-Identifier: Apache-2.0
"""A run and its points as tables and sentences, and figures as the cells of tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.point_record import BenchPoint, Distribution
from dflash_trt.observe.bench.report.intervals import Speedup
from dflash_trt.observe.bench.run_record import BenchRun
from dflash_trt.observe.pages.page_templates import Table

NONE = "-"
TAU = "tau of drafting passes"
IF_ANY = ("lost", "cut")
"""Columns that are left out if all their cells are 0."""


def factor_text(factor: Speedup | None) -> str:
    """3.1x (2.9-3.3), a dash, or that the figure cannot be."""
    if factor is None:
        return NONE
    if not factor.is_possible:
        return "too busy to tell"
    spread = "" if factor.interval is None else f" ({factor.interval[0]:.2f}-{factor.interval[1]:.2f})"
    return f"{factor.value:.2f}x{spread}"


def rate_text(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def tau_text(tau: float | None) -> str:
    return NONE if tau is None else f"{tau:.2f}"


def run_facts(run: BenchRun) -> Iterator[tuple[str, str]]:
    """Servers, prompts, requests and load of a run, by name."""
    client, prompts, request = run.client, run.prompt_set, run.request
    gpus = ", ".join(client.gpus) or "no GPU"
    yield "created", run.created
    yield "server", run.server or "not stated"
    yield "GPUs of a server", f"{run.num_gpus or 'not stated, so throughput is per server'}"
    yield "load sent from", f"{client.cpu}, {client.cores} cores, {client.memory_gib:.0f} GiB, {gpus}"
    yield "prompts", f"{prompts.num_prompts} of {prompts.name} from {prompts.source}, sha256 {prompts.sha256[:12]}"
    yield "requests", _settings(request)
    yield "load", load_text(run)
    yield "concurrency", ", ".join(map(str, run.concurrencies))
    for m in run.methods:
        overrides = f", with {_settings(m.overrides)}" if m.overrides else ""
        yield m.name, f"{m.model} at {m.url}, {m.runtime} {m.runtime_version or '(version unknown)'}{overrides}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())
    yield "seed", str(run.seed)


def experiment_table(run: BenchRun) -> Table:
    """A run that is not begun yet."""
    categories = run.prompt_set.categories
    points = len(run.methods) * max(1, len(categories)) * len(run.concurrencies)
    rows = [*run_facts(run), ("categories", ", ".join(categories) or NONE), ("points", str(points))]
    rows += [("warning", warning) for warning in run.warnings]
    return Table(title="Experiment", columns=("setting", "value"), rows=tuple(rows))


def load_text(run: BenchRun) -> str:
    """Closed or open loop, in words."""
    if run.arrivals is None:
        return "closed loop: the next request begins when one ends"
    pattern, rate = run.arrivals.arrival_pattern, run.arrivals.request_rate
    if rate is None:
        return "open loop: each prompt begins at its timestamp"
    return f"open loop: {rate:g} requests/s, {pattern}, at most as many at once as the concurrency"


def point_tables(run: BenchRun, points: Sequence[BenchPoint]) -> Iterator[Table]:
    """A table of each category."""
    for category in dict.fromkeys(point.category for point in points):
        of = "" if category is None else f", {category}"
        rows = [_row(point) for point in points if point.category == category]
        columns = tuple(name for name in rows[0] if name not in IF_ANY or any(row[name] != "0" for row in rows))
        yield Table(
            title=f"{run.prompt_set.name}{of}: {_settings(run.request)}",
            columns=columns,
            rows=tuple(tuple(row[name] for name in columns) for row in rows),
        )


def _row(point: BenchPoint) -> dict[str, str]:
    return {
        "method": point.method,
        "at once": str(point.concurrency),
        "done": str(len(point.rows)),
        "lost": str(point.lost),
        "cut": str(sum(row.is_cut for row in point.rows)),
        "tokens/s": f"{point.output_tokens_per_second:.1f}",
        "tokens/s per user": _median(point.user_tokens_per_second, 1),
        "TTFT, ms": _median(point.latencies.get("time_to_first_token"), 0),
        TAU: tau_text(point.acceptance.tau_of_drafting_passes),
    }


def _median(distribution: Distribution | None, decimals: int) -> str:
    return NONE if distribution is None else f"{distribution.p50:.{decimals}f}"


def _settings(request: object) -> str:
    """Settings that are not left off."""
    fields = msgspec.to_builtins(request)
    chosen = {key: value for key, value in fields.items() if value not in (None, {}) and value is not False}
    return ", ".join(f"{key} {_text(value)}" for key, value in chosen.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def describe_point(point: BenchPoint) -> str:
    """One measured point in one line."""
    tau, category = point.acceptance.tau_of_drafting_passes, "" if point.category is None else f" {point.category}"
    acceptance = "" if tau is None else f", tau of drafting passes {tau:.2f}"
    requests = f"{len(point.rows)} of {point.sent} requests"
    rate = f"{point.output_tokens_per_second:.1f} tokens/s"
    return f"{point.method}{category} c{point.concurrency}: {requests}, {rate}{acceptance}"
