# SPDX-License-Identifier: Apache-2.0
"""run.json: what a bench run measures, where, and with which settings; how the settings of two runs differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.processor import cpu_model
from dflash_trt.files.read import is_file_name

SCHEMA = "dflash-trt/bench/3"
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
SETTINGS = ("seed", "server", "num_gpus", "concurrencies", "arrivals", "goodput")
VERSIONS = ("dflash_trt", "aiperf")
"""Programs of which another version makes another run."""


class BenchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records; unknown fields in a file are errors."""


class LoadMachine(BenchRecord, frozen=True, kw_only=True):
    cpu: str
    cores: Positive
    memory_gib: Amount
    gpus: tuple[str, ...] = ()


class PromptSet(BenchRecord, frozen=True, kw_only=True):
    """Identity of the prompts; `sha256` is the hash of what is sent."""

    name: str
    source: str
    sha256: str
    num_prompts: Positive
    categories: tuple[str, ...] = ()


class RequestSettings(BenchRecord, frozen=True, kw_only=True):
    template: Literal["chat", "completions"]
    thinking: Literal["on", "off"] | None = None
    temperature: Amount
    max_tokens: Positive
    ignore_eos: bool = False
    extra: dict[str, str | int | float | bool] = {}
    """Further fields of each body: reasoning_effort, top_p."""


class Arrivals(BenchRecord, frozen=True, kw_only=True):
    """Open loop: requests begin at a rate, whatever the server answers, and a point's concurrency only bounds them."""

    request_rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Requests a second; None with fixed-schedule."""
    arrival_pattern: Literal["poisson", "constant", "fixed-schedule"] = "poisson"
    """fixed-schedule: each prompt begins at its own timestamp."""

    def __post_init__(self) -> None:
        if (self.request_rate is None) != (self.arrival_pattern == "fixed-schedule"):
            raise ConfigError(f"arrivals: expected a rate or fixed-schedule, found {shown(msgspec.to_builtins(self))}")


class BenchMethod(BenchRecord, frozen=True, kw_only=True):
    name: str
    url: str
    runtime: str
    runtime_version: str | None = None
    model: str
    overrides: dict[str, str | int | float | bool | None] = {}
    """Fields of RequestSettings in which its requests differ from the run's."""


class BenchRun(BenchRecord, frozen=True, kw_only=True):
    """run.json."""

    schema: str = SCHEMA
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    seed: int
    versions: dict[str, str]
    client: LoadMachine
    server: str | None = None
    """The server's hardware, as the user stated it: '8x B300'."""
    num_gpus: Positive | None = None
    """GPUs of each server, as the user stated them; None: throughput is per server."""
    prompt_set: PromptSet
    request: RequestSettings
    concurrencies: tuple[Positive, ...]
    arrivals: Arrivals | None = None
    """None: closed loop, with as many requests at once as a point's concurrency says."""
    goodput: str | None = None
    """Limits that a good request keeps, as AIPerf's --goodput takes them."""
    methods: tuple[BenchMethod, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_schema(self.schema)
        methods = tuple(method.name for method in self.methods)
        for kind, names in (("methods", methods), ("categories", self.prompt_set.categories)):
            for name in names:
                check_name(kind, name)
            if len(set(names)) != len(names):
                raise ConfigError(f"{kind}: expected each once, found {shown(list(names))}")
        if not methods or not self.concurrencies or len(set(self.concurrencies)) != len(self.concurrencies):
            raise ConfigError(f"expected methods, and concurrencies each once, found {shown(self.concurrencies)}")


def request_of(request: RequestSettings, method: BenchMethod) -> RequestSettings:
    """Settings of one method's requests."""
    return msgspec.convert({**msgspec.to_builtins(request), **method.overrides}, RequestSettings)


def check_schema(schema: str) -> None:
    """Raises ConfigError for a file of another kind or time."""
    if schema != SCHEMA:
        raise ConfigError(f"schema: expected {SCHEMA}, found {shown(schema)}")


def check_name(kind: str, name: str) -> None:
    """Raises ConfigError for a method or category that cannot be the name of its folder."""
    if not is_file_name(name) or name.startswith(".") or name.endswith(".json") or name == "aiperf":
        raise ConfigError(f"{kind}: expected a name that can be a folder's, found {shown(name)}")


def differences(begun: BenchRun, wanted: BenchRun) -> Iterator[str]:
    """Settings that differ, as "request.temperature: 0.0 there, 1.0 asked for"."""
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
    is_open = run.arrivals is not None  # concurrency is only a bound then
    if not is_open and (unreached := [value for value in run.concurrencies if value > num_prompts]):
        yield (
            f"about {num_prompts} prompts a point never keep {', '.join(map(str, unreached))} requests going:"
            " --num-prompts repeats them"
        )


def _settings(run: BenchRun) -> dict[str, object]:
    """Settings by path: request.temperature, methods.dflash.url."""
    document = msgspec.to_builtins(run)
    nested = {name: document[name] for name in ("prompt_set", "request")}
    nested |= {f"methods.{method['name']}": method for method in document["methods"]}
    nested["versions"] = {name: run.versions.get(name) for name in VERSIONS}
    settings = {f"{place}.{name}": value for place, values in nested.items() for name, value in values.items()}
    return settings | {name: document[name] for name in SETTINGS}


def _text(value: object) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()


def load_machine() -> LoadMachine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return LoadMachine(cpu=cpu_model(), cores=os.cpu_count() or 1, memory_gib=round(memory, 1), gpus=_gpus())


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
