# SPDX-License-Identifier: Apache-2.0
"""Output of `bench run`: the experiment, its progress, and the measured points."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_trt.cli.output import print_json, print_tables
from dflash_trt.observe.bench.report.run_tables import describe_point, experiment_table, point_tables
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.bench.run_record import BenchRun
from dflash_trt.observe.bench.sweep import Sweep, SweepPoint


def print_experiment(run: BenchRun, *, as_json: bool) -> None:
    if as_json:
        print_json("bench-experiment", {"run": msgspec.to_builtins(run)})
    else:
        print_tables([experiment_table(run)])


def print_points(output: Path, *, as_json: bool) -> None:
    run = read_run(output)
    points = read_points(output, run)
    if as_json:
        short = [
            {k: v for k, v in msgspec.to_builtins(point).items() if k not in ("rows", "schema")} for point in points
        ]
        print_json("bench-run", {"run": msgspec.to_builtins(run), "points": short})
    else:
        print_tables(point_tables(run, points))


def measure(sweep: Sweep) -> None:
    """Measures all missing points, and counts their answers on stderr."""
    missing = sweep.missing()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("", total=sum(point.num_requests for point in missing), visible=bool(missing))
        num_answers, count = 0, f"/{len(missing)}"

        def show(point: SweepPoint, num_new: int) -> None:
            category = "" if point.category is None else f" {point.category}"
            text = f"{point.method}{category} c{point.concurrency} ({missing.index(point) + 1}{count})"
            bar.update(task, description=text, completed=num_answers + num_new)

        bar.update(task, description="starting")
        for point, measured, warnings in sweep.measure(show):
            num_answers += point.num_requests  # all planned ones: a failed request ends its conversation
            bar.update(task, completed=num_answers)
            if not is_terminal:
                click.echo(f"{missing.index(point) + 1}{count} {describe_point(measured)}", err=True)
            for warning in warnings:
                console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
