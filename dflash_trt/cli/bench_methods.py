# SPDX-License-Identifier: Apache-2.0
"""What `bench run`'s options ask for: methods, prompts and settings, looked at before anything is sent."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt import __version__
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import json_document
from dflash_trt.observe.bench.records import Client as ClientMachine
from dflash_trt.observe.bench.records import Method, RequestSettings, Run, check_name

if TYPE_CHECKING:
    from dflash_trt.observe.bench.prompt_list import PromptList
    from dflash_trt.observe.bench.sweep import Sweep, Target

PLAIN, DFLASH = "none", "dflash"
KINDS = {"temperature": float, "max_tokens": int, "template": str, "thinking": str, "ignore_eos": str}
OURS = {*KINDS, "model", "messages", "prompt", "stream", "stream_options", "seed", "n", "max_completion_tokens"}
MAX_KEY_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would be measured."""

    targets: tuple[Target, ...]
    prompts: PromptList
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The options, as click gives them."""

    endpoints: tuple[str, ...]
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
    extra: tuple[str, ...]
    overrides: tuple[str, ...]
    model: str | None
    api_key_file: Path | None
    request_timeout: float
    seed: int
    hardware: str | None
    num_gpus: int | None

    def plan(self) -> Plan:
        """Prompts and methods; asks the endpoints what they are. Raises DFlashError for what cannot be measured."""
        from dflash_trt.observe.bench.prompt_list import read_prompt_list
        from dflash_trt.observe.bench.run_settings import settings_warnings

        prompts = read_prompt_list(self.prompts, split=self.split)
        if self.categories:
            prompts = prompts.only(self.categories)
        if self.num_prompts is not None:
            prompts = prompts.exactly(self.num_prompts)
        if self.template == "completions" and any(len(prompt.turns) > 1 for prompt in prompts.prompts):
            raise ConfigError("--template completions: expected prompts of one turn, found conversations")
        targets = tuple(self._targets())
        run = Run(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=(),
            seed=self.seed,
            versions={"dflash_trt": __version__, "python": platform.python_version()},
            client=_client(),
            server=self.hardware,
            num_gpus=self.num_gpus,
            prompt_set=prompts.record(is_pooled=self.pooled),
            request=msgspec.convert(
                {"template": self.template, "thinking": self.thinking, "temperature": self.temperature,
                 "max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "extra": self._extra()}, RequestSettings,
            ),
            concurrencies=self.concurrency,
            methods=tuple(target.method for target in targets),
        )  # fmt: skip
        return Plan(targets=targets, prompts=prompts, run=msgspec.structs.replace(run, warnings=settings_warnings(run)))

    def begin(
        self, plan: Plan, output: Path, aiperf: Path, command: tuple[str, ...]
    ) -> tuple[Sweep, tuple[Target, ...]]:
        """The run in `output`, begun or gone on with."""
        from dflash_trt.observe.bench.aiperf_environment import VERSION
        from dflash_trt.observe.bench.run_settings import begin_run
        from dflash_trt.observe.bench.sweep import Sweep

        wanted = msgspec.structs.replace(plan.run, command=command, versions={**plan.run.versions, "aiperf": VERSION})
        run = begin_run(output, wanted)
        sweep = Sweep(
            directory=output, run=run, prompts=plan.prompts, aiperf=aiperf,
            timeout_seconds=self.request_timeout, api_key=self._api_key(),
        )  # fmt: skip
        return sweep, plan.targets

    def _targets(self) -> Iterator[Target]:
        overrides = self._overrides()
        found = list(self._own_targets() if self.engine is not None else self._endpoint_targets())
        names = [target.method.name for target in found]
        if unknown := overrides.keys() - set(names):
            raise ConfigError(f"--set: expected one of {', '.join(names)}, found {', '.join(sorted(unknown))}")
        for target in found:
            method = msgspec.structs.replace(target.method, overrides=overrides.get(target.method.name, {}))
            yield dataclasses.replace(target, method=method)

    def _endpoint_targets(self) -> Iterator[Target]:
        from dflash_trt.observe.bench.sweep import Target
        from dflash_trt.observe.endpoints.client import Client
        from dflash_trt.observe.endpoints.identify import identify

        if any(option is not None for option in (self.target, self.draft_length, self.dtype)):
            raise click.UsageError("--target, --draft-length and --dtype belong to --engine")
        if not self.endpoints:
            raise click.UsageError("expected --endpoint NAME=URL, or --engine and --target")
        key = self._api_key()
        for given in self.endpoints:
            name, separator, url = given.partition("=")
            if not (name and separator and url):
                raise click.UsageError(f"--endpoint: expected NAME=URL, found {given!r}")
            check_name("--endpoint", name)
            with Client(url, api_key=key, timeout=min(self.request_timeout, 60)) as client:
                runtime = identify(client, model=self.model)
                method = Method(
                    name=name, url=client.url, runtime=runtime.kind, runtime_version=runtime.version,
                    model=runtime.model,
                )  # fmt: skip
            yield Target(method=method, opened=_already(client.url))

    def _own_targets(self) -> Iterator[Target]:
        from dflash_trt.observe.bench.own_server import MODEL, OwnServer
        from dflash_trt.observe.bench.sweep import Target

        if self.endpoints or self.target is None or self.engine is None:
            raise click.UsageError("--engine: expected --target, and no --endpoint")
        if not self.engine.is_dir():
            raise ConfigError(f"{self.engine}: expected an engine directory", hint="dflash-trt build writes one")
        most = max(self.concurrency)
        for name, draft_length in ((PLAIN, "0"), (DFLASH, self.draft_length)):
            server = OwnServer(
                engine=self.engine, target=self.target, draft_length=draft_length,
                max_batch_size=most if most > 16 else None, dtype=self.dtype,
            )  # fmt: skip
            method = Method(
                name=name, url=" ".join(("dflash-trt", *server.words())), runtime="dflash-trt",
                runtime_version=__version__, model=MODEL,
            )  # fmt: skip
            yield Target(method=method, opened=server.running)

    def _overrides(self) -> dict[str, dict[str, str | int | float | bool | None]]:
        found: dict[str, dict[str, str | int | float | bool | None]] = {}
        for given in self.overrides:
            place, separator, value = given.partition("=")
            name, _, field = place.rpartition(".")
            if not (name and separator and field in KINDS):
                raise click.UsageError(f"--set: expected NAME.FIELD=VALUE with {', '.join(KINDS)}, found {given!r}")
            try:
                read = {"on": True, "off": False}[value] if field == "ignore_eos" else KINDS[field](value)
                msgspec.convert({"template": "chat", "temperature": 0.0, "max_tokens": 1, field: read}, RequestSettings)
            except (KeyError, ValueError, msgspec.ValidationError):
                raise ConfigError(f"--set: expected a value of {field}, found {shown(value)}") from None
            found.setdefault(name, {})[field] = read
        return found

    def _extra(self) -> dict[str, str | int | float | bool]:
        """Values are JSON where they can be: top_p=0.95 is a number, reasoning_effort=low a text."""
        found: dict[str, str | int | float | bool] = {}
        for given in self.extra:
            field, separator, value = given.partition("=")
            if not (separator and field.isidentifier()) or field in OURS:
                raise click.UsageError(
                    f"--extra: expected FIELD=VALUE with a field not said otherwise, found {given!r}"
                )
            try:
                read = json_document(value.encode(), "--extra", ConfigError)
            except ConfigError:
                read = value
            found[field] = read if isinstance(read, int | float) else value
        return found

    def _api_key(self) -> str | None:
        from dflash_trt.files.read import read_text

        if self.api_key_file is None:
            return None
        key = read_text(self.api_key_file, ConfigError, limit=MAX_KEY_BYTES).partition("\n")[0].strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(f"{self.api_key_file}: expected a key on its first line, found none")
        return key


def _already(url: str) -> Callable[[], AbstractContextManager[str]]:
    return lambda: nullcontext(url)


def _client() -> ClientMachine:
    from dflash_trt.doctor import cpu_model

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return ClientMachine(cpu=cpu_model(), cores=os.cpu_count() or 1, memory_gib=round(memory, 1), gpus=_gpus())


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
