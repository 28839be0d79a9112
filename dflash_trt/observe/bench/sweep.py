# SPDX-License-Identifier: Apache-2.0
"""All points of a run, one after another; those that are done are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.bench.aiperf_run import AiperfLoad, body_fields, run_load
from dflash_trt.observe.bench.measured_point import measured_point
from dflash_trt.observe.bench.prompt_list import PromptList
from dflash_trt.observe.bench.records import BenchMethod, BenchPoint, BenchRun, RequestSettings
from dflash_trt.observe.bench.run_directory import point_file, read_point, write_point, write_run
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import Runtime, identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodServer:
    method: BenchMethod
    opened: Callable[[], AbstractContextManager[str]]
    """Gives the URL, and ends what was started for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    method: str
    category: str | None
    concurrency: int
    num_requests: int


class SweepProgress(Protocol):
    """Shows how far the sweep is."""

    def start(self, method: str) -> None:
        """Its server is reached, or started, and warmed up."""

    def begin(self, plan: PlannedPoint) -> None:
        """A point begins."""

    def advance(self, num_answers: int) -> None:
        """So many of its answers have come."""

    def end(self, point: BenchPoint) -> None:
        """It is done and written."""

    def warn(self, text: str) -> None:
        """What a reader of the run must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What every point of a run shares."""

    directory: Path
    run: BenchRun
    prompts: PromptList
    aiperf: Path
    timeout_seconds: float
    api_key: str | None

    def missing(self, method: str) -> list[PlannedPoint]:
        """The points of a method that are not measured yet; raises ConfigError for a file that is no point."""
        return [plan for plan in self.plan(method) if self._read(plan) is None]

    def plan(self, method: str) -> list[PlannedPoint]:
        """All points of a method, in the order in which they are measured."""
        return [
            PlannedPoint(
                method=method,
                category=category,
                concurrency=concurrency,
                num_requests=sum(prompt.num_requests for prompt in self.prompts.of(category)),
            )
            for category in self.run.prompt_set.categories or (None,)
            for concurrency in self.run.concurrencies
        ]

    def measure(self, server: MethodServer, progress: SweepProgress) -> Iterator[BenchPoint]:
        """The missing points of one method, each written when it is done.

        Raises EndpointError where its server does not answer, or not with what a measurement needs.
        """
        if not (plans := self.missing(server.method.name)):
            return
        progress.start(server.method.name)
        with ExitStack() as stack:
            url = stack.enter_context(server.opened())
            client = stack.enter_context(Client(url, api_key=self.api_key, timeout=self.timeout_seconds))
            runtime = identify(client, model=server.method.model)
            request = request_of(self.run.request, server.method)
            self._warm_up(client, runtime, request)
            for plan in plans:
                progress.begin(plan)
                point = self._measure(plan, client, runtime, request, progress)
                progress.end(point)
                yield point

    def _measure(
        self, plan: PlannedPoint, client: Client, runtime: Runtime, request: RequestSettings, progress: SweepProgress
    ) -> BenchPoint:
        prompts = self.prompts.of(plan.category)
        load = AiperfLoad(
            url=client.url, model=runtime.model, prompts=prompts, request=request, concurrency=plan.concurrency,
            seed=self.run.seed, timeout_seconds=self.timeout_seconds, api_key=self.api_key,
        )  # fmt: skip
        file = point_file(self.directory, plan.method, plan.category, plan.concurrency)
        with acceptance_during(meter(client, runtime)) as end:
            export = run_load(self.aiperf, load, file.parent / "aiperf" / file.stem, progress.advance)
            observed = end()
        point = measured_point(
            export, observed, method=plan.method, category=plan.category, concurrency=plan.concurrency,
            seed=self.run.seed,
        )  # fmt: skip
        write_point(self.directory, point)
        for text in _warnings(point, plan, observed.output_tokens):
            progress.warn(text)
        return point

    def _warm_up(self, client: Client, runtime: Runtime, request: RequestSettings) -> None:
        """One short answer: what is wrong with the requests is said before there are hundreds."""
        short = msgspec.structs.replace(request, max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
        turns = self.prompts.prompts[0].turns
        until = next(index for index, turn in enumerate(turns, start=1) if turn.role == "user")
        body = {"model": runtime.model, **body_fields(short, self.run.seed)}
        is_chat = request.template == "chat"
        if is_chat:
            body["messages"] = [{"role": turn.role, "content": turn.text} for turn in turns[:until]]
        else:
            body["prompt"] = turns[0].text
        answer = client.answer(body, is_chat=is_chat, deadline_seconds=self.timeout_seconds)
        if answer.output_tokens is None:
            raise EndpointError(
                f"{client.url}: expected the server's own count of tokens in its stream, found none",
                hint="it must answer stream_options.include_usage",
            )

    def _read(self, plan: PlannedPoint) -> BenchPoint | None:
        return read_point(self.directory, plan.method, plan.category, plan.concurrency)


def request_of(request: RequestSettings, method: BenchMethod) -> RequestSettings:
    """What one method's requests ask for."""
    return msgspec.convert({**msgspec.to_builtins(request), **method.overrides}, RequestSettings)


def add_warning(directory: Path, run: BenchRun, text: str) -> BenchRun:
    """The run with one warning more, which is written."""
    if text in run.warnings:
        return run
    changed = msgspec.structs.replace(run, warnings=(*run.warnings, text))
    write_run(directory, changed)
    return changed


def _warnings(point: BenchPoint, plan: PlannedPoint, server_tokens: int | None) -> Iterator[str]:
    where = f"{point.method}{'' if point.category is None else f', {point.category}'}, concurrency {point.concurrency}"
    requests = point.requests
    if lost := requests.failed + requests.timed_out:
        yield f"{where}: {lost} of {requests.sent} requests failed or timed out"
    if requests.sent != plan.num_requests:
        yield f"{where}: {requests.sent} of {plan.num_requests} planned requests were sent"
    elif not lost and server_tokens is not None and server_tokens != point.output_tokens:
        yield (
            f"{where}: the server counted {server_tokens} output tokens, its answers have {point.output_tokens}:"
            " somebody else asked it meanwhile, and acceptance is of both"
        )
