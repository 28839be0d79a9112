# SPDX-License-Identifier: Apache-2.0
"""A run's settings: what makes two runs the same, and what a reader must be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.records import BenchRun
from dflash_trt.observe.bench.run_directory import RUN_FILE, read_run, write_run
from dflash_trt.observe.bench.sweep import request_of

SETTINGS = ("seed", "server", "num_gpus", "prompt_set", "request", "concurrencies", "methods")
VERSIONS = ("dflash_trt", "aiperf")
HINT = "give another -o, or the settings with which it was begun"


def begin_run(directory: Path, run: BenchRun) -> BenchRun:
    """The run that is measured: one that was begun with the same settings, or `run`, which is written.

    Raises ConfigError for a directory that holds something else, or a run of other settings, and says which.
    """
    if not (directory / RUN_FILE).exists():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory}: expected a run or nothing, found something else", hint="give another -o")
        write_run(directory, run)
        return run
    begun = read_run(directory)
    if found := list(differences(begun, run)):
        raise ConfigError(f"{directory}: expected the settings of the run that is there; {'; '.join(found)}", hint=HINT)
    return begun


def differences(begun: BenchRun, wanted: BenchRun) -> Iterator[str]:
    """What makes them two, as "request.temperature: 0.0 there, 1.0 asked for"."""
    old, new = _flat(begun), _flat(wanted)
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
            said = ", ".join(f"{_text(value)} for {name}" for name, value in values.items())
            yield f"the methods differ in {field}: {said}"
    if len(models := {method.model for method in run.methods}) > 1:
        yield f"the methods serve models of different names: {', '.join(sorted(models))}"
    num_prompts = run.prompt_set.num_prompts // max(1, len(run.prompt_set.categories))
    if unreached := [value for value in run.concurrencies if value > num_prompts]:
        yield (
            f"about {num_prompts} prompts a point never keep {', '.join(map(str, unreached))} requests going:"
            " --num-prompts repeats them"
        )


def _flat(run: BenchRun) -> dict[str, object]:
    document = msgspec.to_builtins(run)
    flat = {name: value for key in SETTINGS for name, value in _entries(key, document[key])}
    return flat | {f"versions.{name}": run.versions.get(name) for name in VERSIONS}


def _entries(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entries(f"{name}.{key}", inner)
    elif name == "methods" and isinstance(value, list | tuple):
        for method in value:
            yield from _entries(f"methods.{method['name']}", method)
    else:
        yield name, value


def _text(value: object) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()
