# SPDX-License-Identifier: Apache-2.0
"""The experiment that `bench run` measures: servers, prompts and settings, checked before anything is sent."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_trt import __version__
from dflash_trt.errors import ConfigError
from dflash_trt.observe.bench.method_servers import (
    KeyValues,
    MethodServer,
    engine_servers,
    extra_fields,
    method_overrides,
    running_servers,
    with_overrides,
)
from dflash_trt.observe.bench.prompts.prompt_list import PromptList, read_prompt_list
from dflash_trt.observe.bench.run_record import Arrivals, BenchRun, RequestSettings, load_machine, settings_warnings
from dflash_trt.observe.endpoints.client import read_api_key


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
    goodput: str | None, request_rate: float | None, arrival_pattern: Literal["poisson", "constant"],
    fixed_schedule: bool, **request: Any,
) -> Experiment:  # fmt: skip
    """The experiment that `bench run`'s options describe; `request` are fields of RequestSettings.

    Asks `endpoints` what they are, before prompts are downloaded; without any, `engine` and `target` will be served
    here. Raises DFlashError for what cannot be measured.
    """
    key = read_api_key(api_key_file)
    if engine is not None:
        found = list(engine_servers(engine, target, draft_length, dtype, max(concurrency)))
    else:
        found = list(running_servers(endpoints, model, key, request_timeout))
    chosen = read_prompt_list(prompts, split=split)
    if categories:
        chosen = chosen.only(categories)
    if num_prompts is not None:
        chosen = chosen.exactly(num_prompts)
    if request["template"] == "completions" and any(len(prompt.turns) > 1 for prompt in chosen.prompts):
        raise ConfigError("--template completions: expected prompts of one turn, found conversations")
    servers = tuple(with_overrides(found, method_overrides(overrides)))
    run = BenchRun(
        created=datetime.now(UTC).isoformat(timespec="seconds"), command=(), seed=seed,
        versions={"dflash_trt": __version__, "python": platform.python_version()}, client=load_machine(),
        server=hardware, num_gpus=num_gpus, prompt_set=chosen.record(is_pooled=pooled),
        request=msgspec.convert({**request, "extra": extra_fields(extra)}, RequestSettings),
        concurrencies=concurrency, goodput=goodput,
        arrivals=_arrivals(request_rate, arrival_pattern, chosen, is_replayed=fixed_schedule),
        methods=tuple(server.method for server in servers),
    )  # fmt: skip
    warnings = [*settings_warnings(run), *([] if fixed_schedule else _unused_timestamps(chosen))]
    if chosen.num_skipped:
        warnings.append(f"{chosen.num_skipped} conversations of {chosen.source} were skipped: no user speaks in them")
    run = msgspec.structs.replace(run, warnings=tuple(warnings))
    return Experiment(servers=servers, prompts=chosen, run=run, timeout_seconds=request_timeout, api_key=key)


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
