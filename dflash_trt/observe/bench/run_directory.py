# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: run.json, and points/METHOD/[CATEGORY/]cCONCURRENCY.json, each complete or absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind, new_file
from dflash_trt.observe.bench.records import SCHEMA, BenchPoint, BenchRecord, BenchRun

RUN_FILE = "run.json"
HINT = "`dflash-trt bench run -o RUN` writes it"


def _is_ours(file: Path) -> bool:
    with open_file(file, ConfigError) as stream:
        return f'"schema": "{SCHEMA}"'.encode() in stream.read(100)


RECORD = OutputKind(name="a record of a bench run", recognizes=_is_ours, form="file", option="-o RUN")


def write_run(directory: Path, run: BenchRun) -> None:
    """Writes run.json, in place of an older one; raises BuildError where that cannot be."""
    _write(directory / RUN_FILE, run)


def write_point(directory: Path, point: BenchPoint) -> Path:
    """Writes a point that is done, in place of an older one, and returns its file; raises BuildError as above."""
    file = point_file(directory, point.method, point.category, point.concurrency)
    _write(file, point)
    return file


def point_file(directory: Path, method: str, category: str | None, concurrency: int) -> Path:
    folder = directory / "points" / method / (category or "")
    return folder / f"c{concurrency}.json"


def read_run(directory: Path) -> BenchRun:
    """run.json; raises ConfigError for what is no run."""
    return read_json(directory / RUN_FILE, BenchRun, ConfigError, what=f"a run of {SCHEMA}", hint=HINT)


def read_point(directory: Path, method: str, category: str | None, concurrency: int) -> BenchPoint | None:
    """That point, or None where it is not measured yet; raises ConfigError for what is no point, or another's."""
    file = point_file(directory, method, category, concurrency)
    if not file.exists():
        return None
    point = read_json(file, BenchPoint, ConfigError, what=f"a point of {SCHEMA}", hint=HINT)
    expected, found = (method, category, concurrency), (point.method, point.category, point.concurrency)
    if found != expected:
        raise ConfigError(f"{file}: expected the point {expected}, found {found}", hint="measure it again")
    return point


def read_points(directory: Path, run: BenchRun) -> tuple[BenchPoint, ...]:
    """All that are measured, in the order of the run's methods, categories and concurrencies."""
    return tuple(_points(directory, run))


def _points(directory: Path, run: BenchRun) -> Iterator[BenchPoint]:
    for method in run.methods:
        for category in (None, *run.prompt_set.categories):
            for concurrency in run.concurrencies:
                point = read_point(directory, method.name, category, concurrency)
                if point is not None:
                    yield point


def _write(file: Path, record: BenchRecord) -> None:
    with new_file(file, RECORD, force=True) as new:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
