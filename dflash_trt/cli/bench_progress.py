# SPDX-License-Identifier: Apache-2.0
"""How far `bench run` is: a bar with the time left on a terminal, a line for each point elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_trt.observe.bench.records import BenchPoint
from dflash_trt.observe.bench.sweep import MethodServer, PlannedPoint, Sweep


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
