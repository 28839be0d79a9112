# SPDX-License-Identifier: Apache-2.0
"""What a bench run measures: methods, prompts and settings, checked before anything is sent."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_trt import __version__
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.files.processor import cpu_model
from dflash_trt.observe.bench.prompt_list import PromptList, read_prompt_list
from dflash_trt.observe.bench.records import Arrivals, BenchMethod, BenchRun, LoadMachine, RequestSettings, check_name
from dflash_trt.observe.bench.run_directory import settings_warnings
from dflash_trt.observe.endpoints.client import Client, read_api_key
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.servers.local_server import engine_server, engine_words

MODEL = "engine"
PLAIN, DFLASH = "none", "dflash"
FIELD_TYPES = {"temperature": float, "max_tokens": int, "template": str, "thinking": str, "ignore_eos": str}
"""Settings of requests that a method may override."""
SET_BY_OPTIONS = {
    *FIELD_TYPES, "model", "messages", "prompt", "stream", "stream_options", "seed", "n", "max_completion_tokens"
}  # fmt: skip
IDENTIFY_SECONDS = 60.0
DEFAULT_SERVER_BATCH = 16  # of `serve`
Value = str | int | float | bool
KeyValues = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MethodServer:
    method: BenchMethod
    opened: Callable[[], AbstractContextManager[str]]
    """Starts the server if it is ours, gives its URL, and ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    servers: tuple[MethodServer, ...]
    prompts: PromptList
    run: BenchRun
    timeout_seconds: float
    api_key: str | None


def design(
    *, endpoints: KeyValues, engine: Path | None, target: str | None, draft_length: str | None, dtype: str | None,
    prompts: str, split: str | None, categories: Sequence[str], pooled: bool, num_prompts: int | None,
    concurrency: tuple[int, ...], extra: KeyValues, overrides: KeyValues, model: str | None, api_key_file: Path | None,
    request_timeout: float, seed: int, hardware: str | None, num_gpus: int | None,
    request_rate: float | None, arrival_pattern: Literal["poisson", "constant"], fixed_schedule: bool, **request: Any,
) -> Experiment:  # fmt: skip
    """The experiment that `bench run`'s options describe; `request` are fields of RequestSettings.

    Asks `endpoints` what they are; without any, `engine` and `target` will be served here. Raises DFlashError for what
    cannot be measured.
    """
    chosen = read_prompt_list(prompts, split=split)
    if categories:
        chosen = chosen.only(categories)
    if num_prompts is not None:
        chosen = chosen.exactly(num_prompts)
    if request["template"] == "completions" and any(len(prompt.turns) > 1 for prompt in chosen.prompts):
        raise ConfigError("--template completions: expected prompts of one turn, found conversations")
    key = read_api_key(api_key_file)
    if engine is not None:
        found = _served_here(engine, target, draft_length, dtype, max(concurrency))
    else:
        found = _running(endpoints, model, key, min(request_timeout, IDENTIFY_SECONDS))
    servers = tuple(_with_overrides(found, method_overrides(overrides)))
    run = BenchRun(
        created=datetime.now(UTC).isoformat(timespec="seconds"), command=(), seed=seed,
        versions={"dflash_trt": __version__, "python": platform.python_version()}, client=_load_machine(),
        server=hardware, num_gpus=num_gpus, prompt_set=chosen.record(is_pooled=pooled),
        request=msgspec.convert({**request, "extra": extra_fields(extra)}, RequestSettings),
        concurrencies=concurrency,
        arrivals=_arrivals(request_rate, arrival_pattern, chosen, is_replayed=fixed_schedule),
        methods=tuple(server.method for server in servers),
    )  # fmt: skip
    warnings = [*settings_warnings(run), *([] if fixed_schedule else _unused_timestamps(chosen))]
    run = msgspec.structs.replace(run, warnings=tuple(warnings))
    return Experiment(servers=servers, prompts=chosen, run=run, timeout_seconds=request_timeout, api_key=key)


def _running(endpoints: KeyValues, model: str | None, key: str | None, timeout: float) -> Iterator[MethodServer]:
    names = [name for name, _ in endpoints]
    if len(set(names)) < len(names):
        raise ConfigError(f"--endpoint: expected each name once, found {', '.join(names)}")
    for name, url in endpoints:
        check_name("--endpoint", name)
        with Client(url, api_key=key, timeout=timeout) as client:
            runtime = identify(client, model=model)
        method = BenchMethod(
            name=name, url=client.url, runtime=runtime.kind, runtime_version=runtime.version, model=runtime.model
        )
        yield MethodServer(method, partial(_elsewhere, client.url))


def _elsewhere(url: str) -> AbstractContextManager[str]:
    return nullcontext(url)


def _arrivals(
    rate: float | None, pattern: Literal["poisson", "constant"], prompts: PromptList, *, is_replayed: bool
) -> Arrivals | None:
    if not is_replayed:
        return None if rate is None else Arrivals(request_rate=rate, arrival_pattern=pattern)
    for prompt in prompts.prompts:
        if prompt.timestamp is msgspec.UNSET or prompt.num_requests > 1:
            found = "none" if prompt.timestamp is msgspec.UNSET else "a conversation of several requests"
            raise ConfigError(
                f"--fixed-schedule: {prompt.id}: expected one request with a timestamp, in ms, found {found}"
            )
    return Arrivals(arrival_pattern="fixed-schedule")


def _unused_timestamps(prompts: PromptList) -> Iterator[str]:
    if any(prompt.timestamp is not msgspec.UNSET for prompt in prompts.prompts):
        yield "the prompts have timestamps, which only --fixed-schedule replays"


def _served_here(
    engine: Path, target: str | None, draft_length: str | None, dtype: str | None, concurrency: int
) -> Iterator[MethodServer]:
    if not engine.is_dir():
        raise ConfigError(f"{engine}: expected an engine directory", hint="dflash-trt build writes one")
    batch = concurrency if concurrency > DEFAULT_SERVER_BATCH else None
    for name, length in ((PLAIN, "0"), (DFLASH, draft_length)):
        words = engine_words(
            engine, served_model_name=MODEL, target=target, draft_length=length, max_batch_size=batch, dtype=dtype
        )
        method = BenchMethod(
            name=name, url=" ".join(("dflash-trt", *words)), runtime="dflash-trt", runtime_version=__version__,
            model=MODEL,
        )  # fmt: skip
        yield MethodServer(method, partial(_served, words))


def _served(words: list[str]) -> AbstractContextManager[str]:
    return engine_server(words).running(lambda *_: None)


def _with_overrides(
    servers: Iterator[MethodServer], overrides: Mapping[str, dict[str, Value | None]]
) -> Iterator[MethodServer]:
    by_name = {server.method.name: server for server in servers}
    if unknown := overrides.keys() - by_name.keys():
        raise ConfigError(f"--set: expected one of {', '.join(by_name)}, found {', '.join(sorted(unknown))}")
    for name, server in by_name.items():
        method = msgspec.structs.replace(server.method, overrides=overrides.get(name, {}))
        yield MethodServer(method, server.opened)


def method_overrides(pairs: KeyValues) -> dict[str, dict[str, Value | None]]:
    """Settings by method; raises ConfigError for a field or value that requests do not have."""
    overrides: dict[str, dict[str, Value | None]] = {}
    for place, text in pairs:
        name, _, field = place.rpartition(".")
        if not name or field not in FIELD_TYPES:
            raise ConfigError(f"--set: expected METHOD.FIELD=VALUE with {', '.join(FIELD_TYPES)}, found {shown(place)}")
        try:
            value = {"on": True, "off": False}[text] if field == "ignore_eos" else FIELD_TYPES[field](text)
            msgspec.convert({"template": "chat", "temperature": 0.0, "max_tokens": 1, field: value}, RequestSettings)
        except (KeyError, ValueError, msgspec.ValidationError):
            raise ConfigError(f"--set: expected a value of {field}, found {shown(text)}") from None
        overrides.setdefault(name, {})[field] = value
    return overrides


def extra_fields(pairs: KeyValues) -> Mapping[str, Value]:
    """Values are JSON where they can be: top_p=0.95 is a number, reasoning_effort=low a text."""
    fields: dict[str, Value] = {}
    for field, text in pairs:
        if not field.isidentifier() or field in SET_BY_OPTIONS:
            raise ConfigError(f"--extra: expected a field that no other option sets, found {shown(field)}")
        try:
            value = json_document(text.encode(), "--extra", ConfigError)
        except ConfigError:
            value = text
        fields[field] = value if isinstance(value, int | float) else text
    return fields


def _load_machine() -> LoadMachine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return LoadMachine(cpu=cpu_model(), cores=os.cpu_count() or 1, memory_gib=round(memory, 1), gpus=_gpus())


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
