# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: run.json, and points/METHOD/[CATEGORY/]cCONCURRENCY.json, each complete or absent.

A run is gone on with by its own settings only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind, new_file
from dflash_trt.observe.bench.records import SCHEMA, BenchPoint, BenchRecord, BenchRun, request_of

RUN_FILE = "run.json"
SETTINGS = ("seed", "server", "num_gpus", "concurrencies")
VERSIONS = ("dflash_trt", "aiperf")
"""Whose change makes another run, beside settings, prompts and methods."""
OTHER_RUN = "give another -o, or the settings with which it was begun"
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
    expected, place = (method, category, concurrency), (point.method, point.category, point.concurrency)
    if place != expected:
        raise ConfigError(f"{file}: expected the point {expected}, found {place}", hint="measure it again")
    return point


def read_points(directory: Path, run: BenchRun) -> tuple[BenchPoint, ...]:
    """All that are measured, in the order of the run's methods, categories and concurrencies."""
    places = product(run.methods, (None, *run.prompt_set.categories), run.concurrencies)
    points = (read_point(directory, method.name, category, concurrency) for method, category, concurrency in places)
    return tuple(point for point in points if point is not None)


def begin_run(directory: Path, run: BenchRun) -> BenchRun:
    """The run that is measured: one that was begun with the same settings, or `run`, which is written.

    Raises ConfigError for a directory that holds something else, or a run of other settings, and says which.
    """
    if not (directory / RUN_FILE).exists():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty, and no run of this command", hint="give another -o")
        write_run(directory, run)
        return run
    begun = read_run(directory)
    if changes := list(differences(begun, run)):
        raise ConfigError(
            f"{directory}: the run that is there has other settings: {'; '.join(changes)}", hint=OTHER_RUN
        )
    return begun


def differences(begun: BenchRun, wanted: BenchRun) -> Iterator[str]:
    """What makes them two, as "request.temperature: 0.0 there, 1.0 asked for"."""
    old, new = _settings(begun), _settings(wanted)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"{name}: {_text(old.get(name))} there, {_text(new.get(name))} asked for"


def settings_warnings(run: BenchRun) -> tuple[str, ...]:
    """Where methods cannot be compared as they stand, and points that never reach their concurrency."""
    return tuple(_warnings(run))


def _warnings(run: BenchRun) -> Iterator[str]:
    requests = {method.name: msgspec.to_builtins(request_of(run.request, method)) for method in run.methods}
    for field in msgspec.to_builtins(run.request):
        values = {name: request[field] for name, request in requests.items()}
        if len(set(map(repr, values.values()))) > 1:
            values_text = ", ".join(f"{_text(value)} for {name}" for name, value in values.items())
            yield f"the methods differ in {field}: {values_text}"
    if len(models := {method.model for method in run.methods}) > 1:
        yield f"the methods serve models of different names: {', '.join(sorted(models))}"
    num_prompts = run.prompt_set.num_prompts // max(1, len(run.prompt_set.categories))
    if unreached := [value for value in run.concurrencies if value > num_prompts]:
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


def _write(file: Path, record: BenchRecord) -> None:
    with new_file(file, RECORD, force=True) as new:
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
