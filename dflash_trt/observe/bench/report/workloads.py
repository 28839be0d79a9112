# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: the methods that were measured on the same prompts, or on one category of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.bench.run_record import BenchMethod, BenchRun
from dflash_trt.observe.plots.method_styles import title_of

BASELINE = "none"


class LoadedRun(msgspec.Struct, frozen=True):
    directory: Path
    run: BenchRun
    points: tuple[BenchPoint, ...]


class MethodSeries(msgspec.Struct, frozen=True):
    """One method of one run, on one workload."""

    name: str
    """The method's name, with the run's where two runs share it."""
    run: BenchRun
    method: BenchMethod
    points: tuple[BenchPoint, ...]
    """In order of concurrency."""

    @property
    def title(self) -> str:
        return title_of(self.name)

    def at(self, concurrency: int) -> BenchPoint | None:
        """The point there, unless nothing completed."""
        return next((p for p in self.points if p.concurrency == concurrency and p.rows), None)


class Workload(msgspec.Struct, frozen=True):
    """A set of prompts, or one category of it."""

    prompt_set: str
    category: str | None
    series: tuple[MethodSeries, ...]
    reference: str = BASELINE
    """Method that the others are compared with."""

    @property
    def title(self) -> str:
        return self.prompt_set if self.category is None else f"{self.prompt_set}, {self.category}"

    @property
    def goodput(self) -> str:
        """Limits by which the runs counted good requests; empty where none did."""
        return " or ".join(dict.fromkeys(series.run.goodput for series in self.series if series.run.goodput))

    @property
    def num_gpus(self) -> int | None:
        """GPUs of a server, if every run states them; else throughput is per server."""
        counts = [series.run.num_gpus for series in self.series]
        return None if None in counts else max(count or 1 for count in counts)

    @property
    def per(self) -> str:
        """Unit that throughput is divided by."""
        return "server" if self.num_gpus is None else "GPU"

    def gpu_rate(self, series: MethodSeries, point: BenchPoint) -> float:
        """Output tokens/s of a point, per GPU of its own server or per server."""
        return point.output_tokens_per_second / self.gpus_of(series)

    def gpus_of(self, series: MethodSeries) -> int:
        """Divisor of a series' throughput."""
        return 1 if self.num_gpus is None else series.run.num_gpus or 1

    def compared(self) -> tuple[MethodSeries, ...]:
        return tuple(series for series in self.series if series.name != self.reference)


def reference_title(name: str) -> str:
    """Name of a method in sentences."""
    return "plain decoding" if name == BASELINE else title_of(name)


def load_runs(directories: Sequence[Path]) -> tuple[LoadedRun, ...]:
    """Loads runs; raises ConfigError for anything else, and for a run without points."""
    loaded = []
    for directory in directories:
        run = read_run(directory)
        points = read_points(directory, run)
        if not any(point.rows for point in points):
            raise ConfigError(
                f"{directory}: expected a point with a completed request, found {len(points)} points without",
                hint="let `dflash-trt bench run` finish; it resumes where it stopped",
            )
        loaded.append(LoadedRun(directory, run, points))
    return tuple(loaded)


def workloads(runs: Sequence[LoadedRun], reference: str = BASELINE) -> tuple[Workload, ...]:
    """Every set of prompts as a whole, then its categories, where there is a point; runs of one set are merged.

    Raises ConfigError for a `reference` other than plain decoding that no run has.
    """
    names = dict.fromkeys(method.name for loaded in runs for method in loaded.run.methods)
    if reference not in (BASELINE, *names):
        raise ConfigError(f"--reference: expected one of {', '.join(names)}, found {shown(reference)}")
    result = []
    for key in dict.fromkeys(_key(run) for run in runs):
        of_set = [run for run in runs if _key(run) == key]
        categories = dict.fromkeys(category for loaded in of_set for category in loaded.run.prompt_set.categories)
        for category in (None, *categories):
            series = _series(of_set, category, reference)
            if series:
                result.append(Workload(key[0], category, series, reference))
    return tuple(result)


def _key(loaded: LoadedRun) -> tuple[str, str]:
    return loaded.run.prompt_set.name, loaded.run.prompt_set.sha256


def _series(runs: Sequence[LoadedRun], category: str | None, reference: str) -> tuple[MethodSeries, ...]:
    names = Counter(method.name for loaded in runs for method in loaded.run.methods)
    series: list[MethodSeries] = []
    for loaded in runs:
        for method in loaded.run.methods:
            points = [p for p in loaded.points if p.method == method.name and p.category == category]
            if points:
                is_first = not any(earlier.method.name == method.name for earlier in series)
                name = method.name
                if names[name] > 1 and not (name == reference and is_first):
                    name = f"{title_of(name)} ({loaded.directory.name})"
                ordered = tuple(sorted(points, key=lambda p: p.concurrency))
                series.append(MethodSeries(name, loaded.run, method, ordered))
    return tuple(series)
