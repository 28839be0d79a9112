# SPDX-License-Identifier: Apache-2.0
"""What a bench run would measure: methods, prompts and settings, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dflash_trt import __version__
from dflash_trt.cli.doctor_machine import cpu_model
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.bench.aiperf_run import VERSION
from dflash_trt.observe.bench.own_server import MODEL, OwnServer
from dflash_trt.observe.bench.prompt_list import PromptList, read_prompt_list
from dflash_trt.observe.bench.records import BenchMethod, BenchRun, LoadMachine, RequestSettings, check_name
from dflash_trt.observe.bench.run_directory import begin_run, settings_warnings
from dflash_trt.observe.bench.sweep import MethodServer, Sweep
from dflash_trt.observe.endpoints.client import Client, read_api_key
from dflash_trt.observe.endpoints.identify import identify

PLAIN, DFLASH = "none", "dflash"
FIELD_TYPES = {"temperature": float, "max_tokens": int, "template": str, "thinking": str, "ignore_eos": str}
"""Settings of requests that a method may have of its own."""
SET_BY_OPTIONS = {
    *FIELD_TYPES, "model", "messages", "prompt", "stream", "stream_options", "seed", "n", "max_completion_tokens"
}  # fmt: skip
IDENTIFY_SECONDS = 60.0
DEFAULT_SERVER_BATCH = 16  # of `serve`
Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    servers: tuple[MethodServer, ...]
    prompts: PromptList
    run: BenchRun


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What is asked, as `bench run`'s options say it."""

    endpoints: tuple[tuple[str, str], ...]
    """Names and URLs of servers that run; none: `engine` and `target` are served here."""
    engine: Path | None
    target: str | None
    draft_length: str | None
    dtype: str | None
    prompts: str
    split: str | None
    categories: tuple[str, ...]
    pooled: bool
    num_prompts: int | None
    concurrency: tuple[int, ...]
    template: str
    thinking: str | None
    temperature: float
    max_tokens: int
    ignore_eos: bool
    extra: tuple[tuple[str, str], ...]
    """Fields of each request's body, and their values as JSON or text."""
    overrides: tuple[tuple[str, str], ...]
    """METHOD.FIELD and value."""
    model: str | None
    api_key_file: Path | None
    request_timeout: float
    seed: int
    hardware: str | None
    num_gpus: int | None

    def plan(self) -> BenchPlan:
        """Prompts and methods; asks the endpoints what they are. Raises DFlashError for what cannot be measured."""
        prompts = read_prompt_list(self.prompts, split=self.split)
        if self.categories:
            prompts = prompts.only(self.categories)
        if self.num_prompts is not None:
            prompts = prompts.exactly(self.num_prompts)
        if self.template == "completions" and any(len(prompt.turns) > 1 for prompt in prompts.prompts):
            raise ConfigError("--template completions: expected prompts of one turn, found conversations")
        servers = tuple(self._with_overrides(self._served_here() if self.engine else self._running()))
        run = BenchRun(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=(),
            seed=self.seed,
            versions={"dflash_trt": __version__, "python": platform.python_version()},
            client=_load_machine(),
            server=self.hardware,
            num_gpus=self.num_gpus,
            prompt_set=prompts.record(is_pooled=self.pooled),
            request=msgspec.convert(
                {"template": self.template, "thinking": self.thinking, "temperature": self.temperature,
                 "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "extra": extra_fields(self.extra)},
                RequestSettings,
            ),
            concurrencies=self.concurrency,
            methods=tuple(server.method for server in servers),
        )  # fmt: skip
        run = msgspec.structs.replace(run, warnings=settings_warnings(run))
        return BenchPlan(servers=servers, prompts=prompts, run=run)

    def begin(self, plan: BenchPlan, output: Path, aiperf: Path, command: tuple[str, ...]) -> Sweep:
        """The run in `output`, begun or continued."""
        wanted = msgspec.structs.replace(plan.run, command=command, versions={**plan.run.versions, "aiperf": VERSION})
        return Sweep(
            directory=output, run=begin_run(output, wanted), prompts=plan.prompts, aiperf=aiperf,
            timeout_seconds=self.request_timeout, api_key=read_api_key(self.api_key_file),
        )  # fmt: skip

    def _with_overrides(self, servers: Iterator[MethodServer]) -> Iterator[MethodServer]:
        overrides = method_overrides(self.overrides)
        by_name = {server.method.name: server for server in servers}
        if unknown := overrides.keys() - by_name.keys():
            raise ConfigError(f"--set: expected one of {', '.join(by_name)}, found {', '.join(sorted(unknown))}")
        for name, server in by_name.items():
            method = msgspec.structs.replace(server.method, overrides=overrides.get(name, {}))
            yield dataclasses.replace(server, method=method)

    def _running(self) -> Iterator[MethodServer]:
        key = read_api_key(self.api_key_file)
        names = [name for name, _ in self.endpoints]
        if len(set(names)) < len(names):
            raise ConfigError(f"--endpoint: expected each name once, found {', '.join(names)}")
        for name, url in self.endpoints:
            check_name("--endpoint", name)
            with Client(url, api_key=key, timeout=min(self.request_timeout, IDENTIFY_SECONDS)) as client:
                runtime = identify(client, model=self.model)
                method = BenchMethod(
                    name=name, url=client.url, runtime=runtime.kind, runtime_version=runtime.version,
                    model=runtime.model,
                )  # fmt: skip
            yield MethodServer(method=method, opened=_running_at(client.url))

    def _served_here(self) -> Iterator[MethodServer]:
        assert self.engine is not None
        if not self.engine.is_dir():
            raise ConfigError(f"{self.engine}: expected an engine directory", hint="dflash-trt build writes one")
        most = max(self.concurrency)
        for name, draft_length in ((PLAIN, "0"), (DFLASH, self.draft_length)):
            server = OwnServer(
                engine=self.engine, target=self.target, draft_length=draft_length,
                max_batch_size=most if most > DEFAULT_SERVER_BATCH else None, dtype=self.dtype,
            )  # fmt: skip
            method = BenchMethod(
                name=name, url=" ".join(("dflash-trt", *server.words())), runtime="dflash-trt",
                runtime_version=__version__, model=MODEL,
            )  # fmt: skip
            yield MethodServer(method=method, opened=server.running)


def method_overrides(pairs: tuple[tuple[str, str], ...]) -> dict[str, dict[str, Value | None]]:
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


def extra_fields(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, Value]:
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


def _running_at(url: str) -> Callable[[], AbstractContextManager[str]]:
    return lambda: nullcontext(url)


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
