# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: per set of prompts and category, the methods that were measured on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import BenchMethod, BenchPoint, BenchRun
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.plots.curves import TITLES

BASELINE = "none"


class LoadedRun(msgspec.Struct, frozen=True):
    directory: Path
    run: BenchRun
    points: tuple[BenchPoint, ...]


class MethodSeries(msgspec.Struct, frozen=True):
    """One method of one run, on one workload."""

    name: str
    """The method's, with the run's where two runs have one of that name."""
    run: BenchRun
    method: BenchMethod
    points: tuple[BenchPoint, ...]
    """By concurrency."""

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    def at(self, concurrency: int) -> BenchPoint | None:
        """The point there, unless nothing completed."""
        return next((p for p in self.points if p.concurrency == concurrency and p.requests.completed), None)


class Workload(msgspec.Struct, frozen=True):
    """A set of prompts, or one category of it."""

    prompt_set: str
    category: str | None
    series: tuple[MethodSeries, ...]

    @property
    def title(self) -> str:
        return self.prompt_set if self.category is None else f"{self.prompt_set}, {self.category}"

    def baseline(self) -> MethodSeries | None:
        """Plain decoding, if it was measured."""
        return next((series for series in self.series if series.name == BASELINE), None)

    def compared(self) -> tuple[MethodSeries, ...]:
        return tuple(series for series in self.series if series.name != BASELINE)


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
    result = []
    for key in dict.fromkeys(_key(run) for run in runs):
        of_set = [run for run in runs if _key(run) == key]
        categories = dict.fromkeys(category for loaded in of_set for category in loaded.run.prompt_set.categories)
        for category in (None, *categories):
            series = _series(of_set, category)
            if series:
                result.append(Workload(key[0], category, series))
    return tuple(result)


def _key(loaded: LoadedRun) -> tuple[str, str]:
    return loaded.run.prompt_set.name, loaded.run.prompt_set.sha256


def _series(runs: Sequence[LoadedRun], category: str | None) -> tuple[MethodSeries, ...]:
    names = Counter(method.name for loaded in runs for method in loaded.run.methods)
    series: list[MethodSeries] = []
    for loaded in runs:
        for method in loaded.run.methods:
            points = [p for p in loaded.points if p.method == method.name and p.category == category]
            if points:
                is_first = not any(earlier.method.name == method.name for earlier in series)
                name = method.name
                if names[name] > 1 and not (name == BASELINE and is_first):
                    name = f"{TITLES.get(name, name)} ({loaded.directory.name})"
                ordered = tuple(sorted(points, key=lambda p: p.concurrency))
                series.append(MethodSeries(name, loaded.run, method, ordered))
    return tuple(series)
