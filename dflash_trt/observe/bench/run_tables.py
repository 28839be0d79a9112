# SPDX-License-Identifier: Apache-2.0
"""A run's plan and its points as tables, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dflash_trt.observe.bench.records import BenchPoint, BenchRun, Distribution
from dflash_trt.observe.pages.page_templates import Table

IF_ANY = ("lost", "cut")
"""Columns that are there where something in them is."""


def plan_tables(run: BenchRun) -> Iterator[Table]:
    """A table for each method, and one of the prompts and what is asked."""
    for method in run.methods:
        fields = msgspec.to_builtins(method)
        facts = tuple((key, _text(value)) for key, value in fields.items() if value not in (None, {}))
        yield Table(title=method.name, columns=("method", "value"), rows=facts)
    rows = (
        ("prompts", f"{run.prompt_set.num_prompts} of {run.prompt_set.name}"),
        ("categories", ", ".join(run.prompt_set.categories) or "-"),
        ("concurrency", ", ".join(map(str, run.concurrencies))),
        ("points", str(len(run.methods) * max(1, len(run.prompt_set.categories)) * len(run.concurrencies))),
        *((f"request {key}", _text(value)) for key, value in msgspec.to_builtins(run.request).items()),
        *(("warning", warning) for warning in run.warnings),
    )
    yield Table(title="Plan", columns=("setting", "value"), rows=rows)


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
    requests, tau = point.requests, point.acceptance.tau_of_drafting_passes
    return {
        "method": point.method,
        "at once": str(point.concurrency),
        "done": str(requests.completed),
        "lost": str(requests.failed + requests.timed_out),
        "cut": str(requests.cut),
        "tokens/s": f"{point.output_tokens_per_second:.1f}",
        "tokens/s per user": _median(point.user_tokens_per_second, 1, 1),
        "TTFT, ms": _median(point.ttft_seconds, 1e3, 0),
        "tau of drafting passes": "-" if tau is None else f"{tau:.2f}",
    }


def _median(distribution: Distribution | None, scale: float, decimals: int) -> str:
    return "-" if distribution is None else f"{distribution.p50 * scale:.{decimals}f}"


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
    requests = f"{point.requests.completed} of {point.requests.sent} requests"
    rate = f"{point.output_tokens_per_second:.1f} tokens/s"
    return f"{point.method}{category} c{point.concurrency}: {requests}, {rate}{acceptance}"
