# SPDX-License-Identifier: Apache-2.0
"""What `bench run` prints: its plan, how far it is, and the points that are measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.observe.bench.records import BenchPoint, BenchRun, Distribution
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.bench.sweep import MethodServer, PlannedPoint, Sweep

IF_ANY = ("lost", "cut")
"""Columns that are there where something in them is."""


def print_plan(run: BenchRun, *, as_json: bool) -> None:
    if as_json:
        print_json("bench-plan", {"run": msgspec.to_builtins(run)})
        return
    for method in run.methods:
        rows = [(key, _text(value)) for key, value in msgspec.to_builtins(method).items() if value not in (None, {})]
        print_table(method.name, ("method", "value"), rows)
    request = [(f"request {key}", _text(value)) for key, value in msgspec.to_builtins(run.request).items()]
    rows = [
        ("prompts", f"{run.prompt_set.num_prompts} of {run.prompt_set.name}"),
        ("categories", ", ".join(run.prompt_set.categories) or "-"),
        ("concurrency", ", ".join(map(str, run.concurrencies))),
        ("points", str(len(run.methods) * max(1, len(run.prompt_set.categories)) * len(run.concurrencies))),
        *request,
        *(("warning", warning) for warning in run.warnings),
    ]
    print_table("Plan", ("setting", "value"), rows)


def print_points(output: Path, *, as_json: bool) -> None:
    run = read_run(output)
    points = read_points(output, run)
    if as_json:
        short = [
            {k: v for k, v in msgspec.to_builtins(point).items() if k not in ("rows", "schema")} for point in points
        ]
        print_json("bench-run", {"run": msgspec.to_builtins(run), "points": short})
    else:
        for category in dict.fromkeys(point.category for point in points):
            of = "" if category is None else f", {category}"
            rows = [_row(point) for point in points if point.category == category]
            columns = [name for name in rows[0] if name not in IF_ANY or any(row[name] != "0" for row in rows)]
            title = f"{run.prompt_set.name}{of}: {_settings(run.request)}"
            print_table(title, columns, [[row[name] for name in columns] for row in rows])


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


def measure(sweep: Sweep, servers: Sequence[MethodServer]) -> None:
    """Measures all points that are missing, and counts their answers on stderr."""
    plans = [plan for server in servers for plan in sweep.missing(server.method.name)]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=sum(plan.num_requests for plan in plans), visible=bool(plans))
        num_answers, count = 0, f"/{len(plans)}"

        def show(plan: PlannedPoint, num_new: int) -> None:
            category = "" if plan.category is None else f" {plan.category}"
            text = f"{plan.method}{category} c{plan.concurrency} ({plans.index(plan) + 1}{count})"
            bar.update(task, description=text, completed=num_answers + num_new)

        for server in servers:
            bar.update(task, description=f"{server.method.name}: starting")
            for plan, point, warnings in sweep.measure(server, show):
                num_answers += plan.num_requests  # all that were planned: who fails in a conversation ends it
                bar.update(task, completed=num_answers)
                if not is_terminal:
                    click.echo(f"{plans.index(plan) + 1}{count} {_described(point)}", err=True)
                for warning in warnings:
                    console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def _described(point: BenchPoint) -> str:
    tau, category = point.acceptance.tau_of_drafting_passes, "" if point.category is None else f" {point.category}"
    acceptance = "" if tau is None else f", tau of drafting passes {tau:.2f}"
    requests = f"{point.requests.completed} of {point.requests.sent} requests"
    rate = f"{point.output_tokens_per_second:.1f} tokens/s"
    return f"{point.method}{category} c{point.concurrency}: {requests}, {rate}{acceptance}"
