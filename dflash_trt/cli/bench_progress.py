# SPDX-License-Identifier: Apache-2.0
"""How far `bench run` is: a bar with the time left on a terminal, a line for each point elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dflash_trt.observe.bench.records import BenchPoint
from dflash_trt.observe.bench.sweep import PlannedPoint, Sweep, add_warning


class Bar:
    """Counts answers over all points that were missing when it began."""

    def __init__(self, sweep: Sweep, progress: Progress) -> None:
        self._sweep = sweep
        self._run = sweep.run
        self._progress = progress
        plans = [plan for method in sweep.run.methods for plan in sweep.missing(method.name)]
        self._num_points, self._index, self._done = len(plans), 0, 0
        self._plan: PlannedPoint | None = None
        total = sum(plan.num_requests for plan in plans)
        self._task = progress.add_task("", total=total, visible=bool(plans))

    def start(self, method: str) -> None:
        self._progress.update(self._task, description=f"{method}: starting")

    def begin(self, plan: PlannedPoint) -> None:
        self._plan = plan
        self._index += 1
        category = "" if plan.category is None else f" {plan.category}"
        text = f"{plan.method}{category} c{plan.concurrency} ({self._index}/{self._num_points})"
        self._progress.update(self._task, description=text)

    def advance(self, num_answers: int) -> None:
        self._progress.update(self._task, completed=self._done + num_answers)

    def end(self, point: BenchPoint) -> None:
        """Counts all that were planned: a conversation that failed is not gone on with."""
        assert self._plan is not None
        self._done += self._plan.num_requests
        self._progress.update(self._task, completed=self._done)
        if self._progress.disable:
            tau = point.acceptance.tau_of_drafting_passes
            acceptance = "" if tau is None else f", tau of drafting passes {tau:.2f}"
            where = f"{point.method}{'' if point.category is None else f' {point.category}'} c{point.concurrency}"
            requests = f"{point.requests.completed} of {point.requests.sent} requests"
            rate = f"{point.output_tokens_per_second:.1f} tokens/s"
            click.echo(f"{self._index}/{self._num_points} {where}: {requests}, {rate}{acceptance}", err=True)

    def warn(self, text: str) -> None:
        """Says it, and keeps it in the run."""
        self._run = add_warning(self._sweep.directory, self._run, text)
        self._progress.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def watching(sweep: Sweep) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    is_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_terminal) as progress:
        yield Bar(sweep, progress)
