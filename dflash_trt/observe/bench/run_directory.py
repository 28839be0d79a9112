# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: run.json, and points/METHOD/[CATEGORY/]cCONCURRENCY.json, each complete or absent.

A run is continued with its own settings only. `load_runs` and `workloads` put several runs side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import read_json
from dflash_trt.files.workspace import SUFFIX
from dflash_trt.files.write import OutputKind, bearing, new_file, sole_writer
from dflash_trt.observe.bench.records import SCHEMA, BenchMethod, BenchPoint, BenchRecord, BenchRun, request_of
from dflash_trt.observe.plots.curves import TITLES

BASELINE = "none"

RUN_FILE = "run.json"
SETTINGS = ("seed", "server", "num_gpus", "concurrencies", "arrivals")
VERSIONS = ("dflash_trt", "aiperf")
"""Versions whose change makes another run, as settings, prompts and methods do."""
OTHER_RUN = "give another -o, or the settings with which it was begun"
HINT = "`dflash-trt bench run -o RUN` writes it"


RECORD = OutputKind(
    name="a record of a bench run", recognizes=bearing(f'"schema": "{SCHEMA}"', 100), form="file", option="-o RUN"
)


def write_run(directory: Path, run: BenchRun) -> None:
    """Writes run.json, in place of an older one; raises BuildError."""
    _write(directory / RUN_FILE, run)


def write_point(directory: Path, point: BenchPoint) -> Path:
    """Writes a finished point, in place of an older one, and returns its file; raises BuildError."""
    return _write(point_file(directory, point.method, point.category, point.concurrency), point)


def point_file(directory: Path, method: str, category: str | None, concurrency: int) -> Path:
    return directory / "points" / method / (category or "") / f"c{concurrency}.json"


def read_run(directory: Path) -> BenchRun:
    """The run in `directory`; raises ConfigError for anything else."""
    return read_json(directory / RUN_FILE, BenchRun, ConfigError, what=f"a run of {SCHEMA}", hint=HINT)


def read_point(directory: Path, method: str, category: str | None, concurrency: int) -> BenchPoint | None:
    """The point, or None if it is not measured yet; raises ConfigError for any other file at its place."""
    file = point_file(directory, method, category, concurrency)
    if not file.exists():
        return None
    point = read_json(file, BenchPoint, ConfigError, what=f"a point of {SCHEMA}", hint=HINT)
    expected, place = (method, category, concurrency), (point.method, point.category, point.concurrency)
    if place != expected:
        raise ConfigError(f"{file}: expected the point {expected}, found {place}", hint="measure it again")
    return point


def read_points(directory: Path, run: BenchRun) -> tuple[BenchPoint, ...]:
    """All that are measured, in the order of the run's methods, categories and concurrencies."""
    places = product(run.methods, (None, *run.prompt_set.categories), run.concurrencies)
    points = (read_point(directory, method.name, category, concurrency) for method, category, concurrency in places)
    return tuple(point for point in points if point is not None)


def sole_measurer(directory: Path) -> AbstractContextManager[None]:
    """Keeps other processes from measuring into `directory` during the block; raises BuildError where one does."""
    return sole_writer(directory / RUN_FILE, RECORD, force=True)


def begin_run(directory: Path, run: BenchRun) -> BenchRun:
    """Continues a run of the same settings or writes `run`; raises ConfigError naming what differs."""
    if not (directory / RUN_FILE).exists():
        if any(not entry.name.endswith(SUFFIX) for entry in directory.glob("*")):
            raise ConfigError(f"{directory} is not empty and holds no bench run", hint="give another -o")
        write_run(directory, run)
        return run
    begun = read_run(directory)
    if changes := list(differences(begun, run)):
        raise ConfigError(f"{directory}: the existing run has other settings: {'; '.join(changes)}", hint=OTHER_RUN)
    return begun


def differences(begun: BenchRun, wanted: BenchRun) -> Iterator[str]:
    """What makes them two, as "request.temperature: 0.0 there, 1.0 asked for"."""
    old, new = _settings(begun), _settings(wanted)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{name}: {_text(old.get(name))} there, {_text(new.get(name))} asked for"


def settings_warnings(run: BenchRun) -> Iterator[str]:
    """Settings that make methods incomparable, and concurrencies that the prompts never reach."""
    requests = {method.name: msgspec.to_builtins(request_of(run.request, method)) for method in run.methods}
    for field in msgspec.to_builtins(run.request):
        values = {name: request[field] for name, request in requests.items()}
        if len(set(map(repr, values.values()))) > 1:
            values_text = ", ".join(f"{_text(value)} for {name}" for name, value in values.items())
            yield f"the methods differ in {field}: {values_text}"
    if len(models := {method.model for method in run.methods}) > 1:
        yield f"the methods serve models of different names: {', '.join(sorted(models))}"
    num_prompts = run.prompt_set.num_prompts // max(1, len(run.prompt_set.categories))
    is_open = run.arrivals is not None  # its concurrency is a bound
    if not is_open and (unreached := [value for value in run.concurrencies if value > num_prompts]):
        yield (
            f"about {num_prompts} prompts a point never keep {', '.join(map(str, unreached))} requests going:"
            " --num-prompts repeats them"
        )


def _settings(run: BenchRun) -> dict[str, object]:
    """By their place: request.temperature, methods.dflash.url."""
    document = msgspec.to_builtins(run)
    nested = {name: document[name] for name in ("prompt_set", "request")}
    nested |= {f"methods.{method['name']}": method for method in document["methods"]}
    nested["versions"] = {name: run.versions.get(name) for name in VERSIONS}
    settings = {f"{place}.{name}": value for place, values in nested.items() for name, value in values.items()}
    return settings | {name: document[name] for name in SETTINGS}


def _text(value: object) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()


def add_warnings(directory: Path, texts: Sequence[str]) -> None:
    """Into run.json, each once."""
    run = read_run(directory)
    if warnings := [text for text in texts if text not in run.warnings]:
        write_run(directory, msgspec.structs.replace(run, warnings=(*run.warnings, *warnings)))


def _write(file: Path, record: BenchRecord) -> Path:
    with new_file(file, RECORD, force=True) as new:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return file


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
    reference: str = BASELINE
    """Method that the others are compared with."""

    @property
    def title(self) -> str:
        return self.prompt_set if self.category is None else f"{self.prompt_set}, {self.category}"

    @property
    def reference_title(self) -> str:
        return reference_title(self.reference)

    def baseline(self) -> MethodSeries | None:
        """The reference, if it was measured."""
        return next((series for series in self.series if series.name == self.reference), None)

    def compared(self) -> tuple[MethodSeries, ...]:
        return tuple(series for series in self.series if series.name != self.reference)


def reference_title(name: str) -> str:
    """What a method is called in sentences."""
    return "plain decoding" if name == BASELINE else TITLES.get(name, name)


def load_runs(directories: Sequence[Path]) -> tuple[LoadedRun, ...]:
    """Loads runs; raises ConfigError for anything else, and for a run without points."""
    loaded = []
    for directory in directories:
        run = read_run(directory)
        points = read_points(directory, run)
        if not any(point.requests.completed for point in points):
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
                    name = f"{TITLES.get(name, name)} ({loaded.directory.name})"
                ordered = tuple(sorted(points, key=lambda p: p.concurrency))
                series.append(MethodSeries(name, loaded.run, method, ordered))
    return tuple(series)
