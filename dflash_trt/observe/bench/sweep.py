# SPDX-License-Identifier: Apache-2.0
"""Measures all points of a run in turn; finished points are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.bench.experiment import Experiment
from dflash_trt.observe.bench.load.aiperf_export import read_export
from dflash_trt.observe.bench.load.aiperf_run import VERSION, AiperfLoad, body_fields, run_load
from dflash_trt.observe.bench.method_servers import MethodServer
from dflash_trt.observe.bench.point_record import BenchPoint
from dflash_trt.observe.bench.run_directory import add_warnings, begin_run, point_file, read_point, write_point
from dflash_trt.observe.bench.run_record import BenchRun, RequestSettings, request_of
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import Runtime, identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    method: str
    category: str | None
    concurrency: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """An experiment as it is measured into a directory."""

    directory: Path
    experiment: Experiment
    run: BenchRun
    """The run as it was begun, which may have been earlier."""
    aiperf: Path

    @classmethod
    def begin(cls, experiment: Experiment, output: Path, aiperf: Path, command: tuple[str, ...]) -> Sweep:
        """Begins or continues the run in `output`."""
        versions = {**experiment.run.versions, "aiperf": VERSION}
        wanted = msgspec.structs.replace(experiment.run, command=command, versions=versions)
        return cls(directory=output, experiment=experiment, run=begin_run(output, wanted), aiperf=aiperf)

    def missing(self) -> list[SweepPoint]:
        """Points that are not measured yet: methods take turns at each concurrency, in random order.

        Raises ConfigError for any other file at the place of one.
        """
        places = list(product(self.run.prompt_set.categories or (None,), self.run.concurrencies))
        points = [
            SweepPoint(
                method=server.method.name,
                category=category,
                concurrency=concurrency,
                num_requests=sum(prompt.num_requests for prompt in self.experiment.prompts.of(category)),
            )
            for server in self.experiment.servers
            for category, concurrency in places
            if read_point(self.directory, server.method.name, category, concurrency) is None
        ]
        random.Random(self.run.seed).shuffle(points)  # noqa: S311  # not for secrets
        return sorted(points, key=lambda point: places.index((point.category, point.concurrency)))

    def measure(
        self, progress: Callable[[SweepPoint, int], None]
    ) -> Iterator[tuple[SweepPoint, BenchPoint, list[str]]]:
        """All missing points, each written when it is measured, with its warnings; all servers run at once.

        `progress` gets the number of a point's answers so far. Raises EndpointError if a server does not answer, or
        counts no tokens.
        """
        points = self.missing()
        names = {point.method for point in points}
        with ExitStack() as stack:
            asked = {
                server.method.name: self._opened(server, stack)
                for server in self.experiment.servers if server.method.name in names
            }  # fmt: skip
            for point in points:
                yield point, *self._measure(point, *asked[point.method], progress)

    def _opened(self, server: MethodServer, stack: ExitStack) -> tuple[Client, Runtime, RequestSettings]:
        """A server that has answered once; it is closed with `stack`."""
        url = stack.enter_context(server.opened)
        client = stack.enter_context(
            Client(url, api_key=self.experiment.api_key, timeout=self.experiment.timeout_seconds)
        )
        runtime = identify(client, model=server.method.model)
        request = request_of(self.run.request, server.method)
        self._warm_up(client, runtime, request)
        return client, runtime, request

    def _measure(
        self, point: SweepPoint, client: Client, runtime: Runtime, request: RequestSettings,
        progress: Callable[[SweepPoint, int], None],
    ) -> tuple[BenchPoint, list[str]]:  # fmt: skip
        progress(point, 0)
        load = AiperfLoad(
            url=client.url, model=runtime.model, prompts=self.experiment.prompts.of(point.category), request=request,
            concurrency=point.concurrency, seed=self.run.seed, timeout_seconds=self.experiment.timeout_seconds,
            api_key=self.experiment.api_key, goodput=self.run.goodput, arrivals=self.run.arrivals,
        )  # fmt: skip
        file = point_file(self.directory, point.method, point.category, point.concurrency)
        with acceptance_during(meter(client, runtime)) as end:
            output = file.parent / "aiperf" / file.stem
            run_load(self.aiperf, load, output, lambda num_answers: progress(point, num_answers))
            observed = end()
        measured = read_export(
            output, observed, method=point.method, category=point.category, concurrency=point.concurrency,
            seed=self.run.seed, max_tokens=request.max_tokens,
            categories={prompt.id: prompt.category for prompt in load.prompts},
        )  # fmt: skip
        write_point(self.directory, measured)
        warnings = list(_warnings(measured, point.num_requests, observed.output_tokens))
        add_warnings(self.directory, warnings)
        return measured, warnings

    def _warm_up(self, client: Client, runtime: Runtime, request: RequestSettings) -> None:
        """Asks for one short answer, so that a bad request fails before the load starts."""
        short = msgspec.structs.replace(request, max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
        turns = self.experiment.prompts.prompts[0].turns
        until = next(index for index, turn in enumerate(turns, start=1) if turn.role == "user")
        body = {"model": runtime.model, **body_fields(short, self.run.seed)}
        is_chat = request.template == "chat"
        if is_chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in turns[:until]]
        else:
            body["prompt"] = turns[0].content
        answer = client.answer(body, is_chat=is_chat, deadline_seconds=self.experiment.timeout_seconds)
        if answer.output_tokens is None:
            raise EndpointError(
                f"{client.url}: the server does not count tokens in its stream",
                hint="it must answer stream_options.include_usage",
            )


def _warnings(point: BenchPoint, num_planned: int, server_tokens: int | None) -> Iterator[str]:
    if point.has_unstreamed_answers:
        yield (
            f"{point.name}: answers came in one piece, so the server, or a proxy before it, does not stream: time to"
            " first token, inter-token latency, users' speed and goodput say nothing"
        )
    if point.lost:
        yield f"{point.name}: {point.lost} of {point.sent} requests failed or timed out"
    if point.sent != num_planned:
        yield f"{point.name}: {point.sent} of {num_planned} planned requests were sent"
    elif not point.lost and server_tokens is not None and server_tokens != point.output_tokens:
        yield (
            f"{point.name}: the server counted {server_tokens} output tokens, its answers have {point.output_tokens}:"
            " another client asked it meanwhile, and acceptance is of both"
        )
