# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: per set of prompts and category, the methods that were measured on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import Method, Point, Row, Run
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.plots.methods import TITLES
from dflash_trt.runtime.acceptance import Acceptance

BASELINE = "none"


class LoadedRun(msgspec.Struct, frozen=True):
    """A run and its points."""

    directory: Path
    run: Run
    points: tuple[Point, ...]


class Series(msgspec.Struct, frozen=True):
    """One method of one run, on one workload."""

    name: str
    """The method's, with the run's where two runs have one of that name."""
    run: Run
    method: Method
    points: tuple[Point, ...]
    """By concurrency."""

    @property
    def title(self) -> str:
        """As people read it."""
        return TITLES.get(self.name, self.name)

    def at(self, concurrency: int) -> Point | None:
        """The point there, unless nothing completed."""
        return next((p for p in self.points if p.concurrency == concurrency and p.requests.completed), None)


class Workload(msgspec.Struct, frozen=True):
    """A set of prompts, or one category of it."""

    prompt_set: str
    category: str | None
    series: tuple[Series, ...]

    @property
    def title(self) -> str:
        """As people read it."""
        return self.prompt_set if self.category is None else f"{self.prompt_set}, {self.category}"

    def baseline(self) -> Series | None:
        """Plain decoding, if it was measured."""
        return next((one for one in self.series if one.name == BASELINE), None)

    def others(self) -> tuple[Series, ...]:
        """All but plain decoding."""
        return tuple(one for one in self.series if one.name != BASELINE)


def load_runs(directories: Sequence[Path]) -> tuple[LoadedRun, ...]:
    """Raises ConfigError for what is no run, or has no point yet."""
    loaded = []
    for directory in directories:
        run = read_run(directory)
        points = read_points(directory, run)
        if not any(point.requests.completed for point in points):
            raise ConfigError(
                f"{directory}: expected a point with a completed request, found {len(points)} points without",
                hint="let `dflash-trt bench run` finish; it goes on where it stopped",
            )
        loaded.append(LoadedRun(directory, run, points))
    return tuple(loaded)


def workloads(runs: Sequence[LoadedRun]) -> tuple[Workload, ...]:
    """Every set of prompts as a whole, then its categories, where there is a point; runs of one set are merged."""
    found = []
    for key in dict.fromkeys(_key(run) for run in runs):
        same = [run for run in runs if _key(run) == key]
        categories = dict.fromkeys(category for one in same for category in one.run.prompt_set.categories)
        for category in (None, *categories):
            series = _series(same, category)
            if series:
                found.append(Workload(key[0], category, series))
    return tuple(found)


def _key(loaded: LoadedRun) -> tuple[str, str]:
    return loaded.run.prompt_set.name, loaded.run.prompt_set.sha256


def _series(runs: Sequence[LoadedRun], category: str | None) -> tuple[Series, ...]:
    names = Counter(method.name for one in runs for method in one.run.methods)
    series: list[Series] = []
    for one in runs:
        for method in one.run.methods:
            points = [p for p in one.points if p.method == method.name and p.category == category]
            if points:
                is_first = not any(other.method.name == method.name for other in series)
                name = method.name
                if names[name] > 1 and not (name == BASELINE and is_first):
                    name = f"{TITLES.get(name, name)} ({one.directory.name})"
                ordered = tuple(sorted(points, key=lambda p: p.concurrency))
                series.append(Series(name, one.run, method, ordered))
    return tuple(series)


class Sample(msgspec.Struct, frozen=True):
    """The completed requests of one method, category and concurrency."""

    rows: tuple[Row, ...]
    tau_of_drafting_passes: float | None
    lost: int | None
    """Requests that failed or timed out; None where the server's load was mixed and rows were picked from it."""


def sample(series: Series, concurrency: int) -> Sample | None:
    """The requests of a point."""
    point = series.at(concurrency)
    if point is None:
        return None
    return Sample(point.rows, point.acceptance.tau_of_drafting_passes, point.requests.failed + point.requests.timed_out)


def picked(category: str, series: Series, concurrency: int) -> Sample | None:
    """The requests of one category, out of a point on all prompts; None where there is none."""
    point = series.at(concurrency)
    rows = tuple(row for row in point.rows if row.category == category) if point else ()
    if not rows:
        return None
    counts = [row.acceptance for row in rows if row.acceptance is not None]
    total = sum(counts, Acceptance()) if len(counts) == len(rows) else Acceptance()
    return Sample(rows, total.tau_of_drafting_passes, None)
