# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: run.json, and points/METHOD/[CATEGORY/]cCONCURRENCY.json, each complete or absent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.files.workspace import SUFFIX
from dflash_trt.files.write import OutputKind, bearing, new_file, sole_writer
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.run_record import SCHEMA, BenchRecord, BenchRun, differences

RUN_FILE = "run.json"
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
    """Continues a run of the same settings, or writes `run` where no point is measured yet.

    Raises ConfigError, naming what differs, for a run with points and other settings.
    """
    if not (directory / RUN_FILE).exists():
        if any(not entry.name.endswith(SUFFIX) for entry in directory.glob("*")):
            raise ConfigError(f"{directory} is not empty and holds no bench run", hint="give another -o")
        write_run(directory, run)
        return run
    begun = read_run(directory)
    changes = list(differences(begun, run))
    if changes and not read_points(directory, begun):
        write_run(directory, run)
        return run
    if changes:
        raise ConfigError(f"{directory}: the existing run has other settings: {'; '.join(changes)}", hint=OTHER_RUN)
    return begun


def add_warnings(directory: Path, texts: Sequence[str]) -> None:
    """Into run.json, each once."""
    run = read_run(directory)
    if warnings := [text for text in texts if text not in run.warnings]:
        write_run(directory, msgspec.structs.replace(run, warnings=(*run.warnings, *warnings)))


def _write(file: Path, record: BenchRecord) -> Path:
    with new_file(file, RECORD, force=True) as new:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return file
