# SPDX-License-Identifier: Apache-2.0
"""Settings of a bench run: those in which two runs differ, and those that a reader must be warned of."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dflash_trt.observe.bench.run_record import BenchRun, request_of

SETTINGS = ("seed", "server", "num_gpus", "concurrencies", "arrivals", "goodput")
VERSIONS = ("dflash_trt", "aiperf")
"""Programs of which another version makes another run."""


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
