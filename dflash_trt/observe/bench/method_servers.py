# SPDX-License-Identifier: Apache-2.0
"""The servers of a bench run: running ones, or our own, which is started when its points are measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_trt import __version__
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.bench.run_record import BenchMethod, RequestSettings, check_name
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.servers.local_server import engine_server, engine_words

FIELD_TYPES = {"temperature": float, "max_tokens": int, "template": str, "thinking": str, "ignore_eos": str}
"""Settings of requests that a method may override."""
SET_BY_OPTIONS = {
    *FIELD_TYPES, "model", "messages", "prompt", "stream", "stream_options", "seed", "n", "max_completion_tokens"
}  # fmt: skip
Value = str | int | float | bool
KeyValues = Sequence[tuple[str, str]]
MODEL = "engine"
PLAIN, DFLASH = "none", "dflash"
IDENTIFY_SECONDS = 60.0
DEFAULT_SERVER_BATCH = 16  # default options of `serve`


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


@dataclass(frozen=True, slots=True)
class MethodServer:
    method: BenchMethod
    opened: AbstractContextManager[str]
    """Starts the server if it is ours, gives its URL, and ends it; used once."""


def running_servers(
    endpoints: KeyValues, model: str | None, key: str | None, request_timeout: float
) -> Iterator[MethodServer]:
    names = [name for name, _ in endpoints]
    if len(set(names)) < len(names):
        raise ConfigError(f"--endpoint: expected each name once, found {', '.join(names)}")
    for name, url in endpoints:
        check_name("--endpoint", name)
        with Client(url, api_key=key, timeout=min(request_timeout, IDENTIFY_SECONDS)) as client:
            runtime = identify(client, model=model)
        method = BenchMethod(
            name=name, url=client.url, runtime=runtime.kind, runtime_version=runtime.version, model=runtime.model
        )
        yield MethodServer(method, nullcontext(client.url))


def engine_servers(
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
        yield MethodServer(method, _served(words))


@contextmanager
def _served(words: list[str]) -> Iterator[str]:
    with engine_server(words).running(lambda *_: None) as server:
        yield server.url


def with_overrides(
    servers: Iterable[MethodServer], overrides: Mapping[str, dict[str, Value | None]]
) -> Iterator[MethodServer]:
    by_name = {server.method.name: server for server in servers}
    if unknown := overrides.keys() - by_name.keys():
        raise ConfigError(f"--set: expected one of {', '.join(by_name)}, found {', '.join(sorted(unknown))}")
    for name, server in by_name.items():
        method = msgspec.structs.replace(server.method, overrides=overrides.get(name, {}))
        yield MethodServer(method, server.opened)
