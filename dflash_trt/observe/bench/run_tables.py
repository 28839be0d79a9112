# SPDX-License-Identifier: Apache-2.0
"""A run and its points as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.files.command import command_line
from dflash_trt.observe.bench.cell_text import NONE, TAU, tau_text
from dflash_trt.observe.bench.point_record import BenchPoint, Distribution
from dflash_trt.observe.bench.run_record import BenchRun
from dflash_trt.observe.pages.page_templates import Table

IF_ANY = ("lost", "cut")
"""Columns that are left out if all their cells are 0."""


def run_facts(run: BenchRun) -> Iterator[str]:
    """Hardware, versions, command and seed, in words."""
    client, prompts, request = run.client, run.prompt_set, run.request
    gpus = ", ".join(client.gpus) or "no GPU"
    thinking = f"thinking {request.thinking}, " if request.thinking else ""
    ended = "eos ignored" if request.ignore_eos else "natural end"
    yield f"created: {run.created}"
    yield f"server: {run.server or 'not stated'}"
    yield f"GPUs of a server: {run.num_gpus or 'not stated, so throughput is per server'}"
    yield f"load sent from: {client.cpu}, {client.cores} cores, {client.memory_gib:.0f} GiB, {gpus}"
    yield f"prompts: {prompts.name}: {prompts.num_prompts} from {prompts.source}, sha256 {prompts.sha256[:12]}"
    yield (
        f"requests: {request.template}, {thinking}temperature {request.temperature:g}, up to {request.max_tokens}"
        f" tokens, {ended}"
    )
    yield f"load: {load_text(run)}"
    for m in run.methods:
        overrides = f", with {m.overrides}" if m.overrides else ""
        yield f"{m.name}: {m.model} at {m.url}, {m.runtime} {m.runtime_version or '(version unknown)'}{overrides}"
    yield f"versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}"
    yield f"command: {command_line(run.command)}"
    yield f"seed: {run.seed}"


def load_text(run: BenchRun) -> str:
    """Closed or open loop, in words."""
    if run.arrivals is None:
        return "closed loop: the next request begins when one ends"
    pattern, rate = run.arrivals.arrival_pattern, run.arrivals.request_rate
    if rate is None:
        return "open loop: each prompt begins at its timestamp"
    return f"open loop: {rate:g} requests/s, {pattern}, at most as many at once as the concurrency"


def experiment_tables(run: BenchRun) -> Iterator[Table]:
    """A table for each method, and one of the prompts and what is asked."""
    for method in run.methods:
        fields = msgspec.to_builtins(method)
        facts = tuple((key, _text(value)) for key, value in fields.items() if value not in (None, {}))
        yield Table(title=method.name, columns=("method", "value"), rows=facts)
    rows = (
        ("prompts", f"{run.prompt_set.num_prompts} of {run.prompt_set.name}"),
        ("categories", ", ".join(run.prompt_set.categories) or "-"),
        ("concurrency", ", ".join(map(str, run.concurrencies))),
        ("load", load_text(run)),
        ("points", str(len(run.methods) * max(1, len(run.prompt_set.categories)) * len(run.concurrencies))),
        *((f"request {key}", _text(value)) for key, value in msgspec.to_builtins(run.request).items()),
        *(("warning", warning) for warning in run.warnings),
    )
    yield Table(title="Experiment", columns=("setting", "value"), rows=rows)


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


def _settings(request: msgspec.Struct) -> str:
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
