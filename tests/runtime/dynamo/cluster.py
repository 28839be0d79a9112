# SPDX-License-Identifier: Apache-2.0
"""Dynamo's frontend and our workers as processes on the loopback, a folder for discovery, and streams through them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests import waiting
from tests.paths import REPOSITORY
from tests.runtime.dynamo.conftest import TARGET
from tests.waiting import PATIENCE

MAX_TOKENS = 150


class Stream:
    """One streamed answer, as far as it has come."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.text = ""
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self.problems: list[str] = []
        """Lines that are neither text nor its end, and a connection that broke."""
        self._body = body | {"stream": True}

    async def read(self, client: httpx2.AsyncClient, url: str) -> None:
        try:
            await self._read(client, url)
        except httpx2.TransportError as error:
            self.problems.append(repr(error))

    async def _read(self, client: httpx2.AsyncClient, url: str) -> None:
        async with client.stream("POST", f"{url}/v1/completions", json=self._body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        self.text += choice["text"]
                        self.num_chunks += 1
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                elif line and line != "data: [DONE]":
                    self.problems.append(line)


def streamed(
    running: Cluster,
    prompts: Sequence[str],
    meanwhile: Callable[[Sequence[Stream]], Awaitable[None]] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[Stream]:
    """All answers at once; `meanwhile` runs beside them."""

    async def main() -> list[Stream]:
        streams = [Stream(running.body(prompt, max_tokens=max_tokens)) for prompt in prompts]
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=PATIENCE, limits=limits) as client:
            work = [stream.read(client, running.url) for stream in streams]
            await asyncio.gather(*work, *([meanwhile(streams)] if meanwhile else []))
        return streams

    return asyncio.run(main())


def single_runs(engine: Path, prompts: Sequence[str], max_tokens: int = MAX_TOKENS) -> list[str]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with LLM(engine, TARGET, max_batch_size=16) as llm:
        return [str(each.text) for each in llm.generate(list(prompts), params)]


def check(streams: Sequence[Stream], texts: Sequence[str]) -> None:
    assert [stream.problems for stream in streams] == [[]] * len(streams)
    assert [stream.finish_reason for stream in streams] == ["length"] * len(streams)
    assert [stream.text for stream in streams] == list(texts)


async def until(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(waiting.until, holds)


ADDRESSES = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
OWN_PYTHON = REPOSITORY / ".venv-dynamo" / "bin" / "python"


def dynamo_python() -> str:
    """A Python that has ai-dynamo beside this package; skips the test where there is none."""
    if OWN_PYTHON.exists():
        return str(OWN_PYTHON)
    if find_spec("dynamo") is None:
        pytest.skip("ai-dynamo is not installed: make dynamo")
    return sys.executable


class Node:
    """One process, with its log."""

    def __init__(self, log: Path, environment: dict[str, str], *command: object) -> None:
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [dynamo_python(), *map(str, command)],
                env=environment, stdout=file, stderr=file,
            )  # fmt: skip

    def await_log(self, pattern: str) -> None:
        self.wait_until(lambda: re.search(pattern, self.log.read_text()) is not None)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        def holds_while_it_runs() -> bool:
            assert self.popen.poll() is None, self.log.read_text()
            return holds()

        waiting.until(holds_while_it_runs, self.log.read_text)


class Worker(Node):
    """`dflash-trt dynamo`, as `start` starts dflash-trt."""

    def __init__(
        self, log: Path, environment: dict[str, str], engine: Path, target: Path, *options: object,
        start: Sequence[str],
    ) -> None:  # fmt: skip
        arguments = ["--target", target, "--host", "127.0.0.1", "--metrics-port", 0]
        super().__init__(log, environment, *start, "dynamo", engine, *arguments, *options)

    def metric(self, name: str) -> float:
        """The sum over a metric's labels."""
        address = re.findall(r"status server bound to: (\S+)", self.log.read_text())[-1]
        text = httpx2.get(f"http://{address}/metrics", timeout=PATIENCE).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


class Cluster:
    """A frontend, and workers that come and go."""

    def __init__(self, directory: Path, engine: Path, target: Path, *frontend_options: object) -> None:
        self.model = engine.name
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.workers: list[Worker] = []
        self.discovery = directory / "discovery"
        self._directory, self._engine, self._target = directory, engine, target
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HOME": str(directory), "DYN_FILE_KV": str(self.discovery),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1", "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        }  # fmt: skip
        options = ["--event-plane", "zmq", *frontend_options]
        self._command = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port, *options]
        self.start_frontend()

    def start_frontend(self) -> None:
        environment = self._environment | dict.fromkeys(ADDRESSES, "127.0.0.1")
        self.frontend = Node(self._directory / "frontend.log", environment, *self._command)

    def add_workers(self, count: int, *options: object, start: Sequence[str] = ("-m", "dflash_trt")) -> list[Worker]:
        added = []
        for _ in range(count):
            log = self._directory / f"worker-{len(self.workers)}.log"
            environment = self._environment
            added.append(Worker(log, environment, self._engine, self._target, *options, start=start))
            self.workers.append(added[-1])
        for worker in added:
            worker.await_log("Serving .* on ")
        self.await_workers()
        return added

    def await_workers(self) -> None:
        """Waits until the frontend knows all live workers."""
        self.frontend.wait_until(lambda: self._knows_model() and self.num_instances() >= len(self.alive))

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.popen.poll() is None]

    def body(self, prompt: object, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}

    def close(self) -> None:
        for node in (self.frontend, *self.workers):
            node.popen.kill()
            node.popen.wait()

    def _knows_model(self) -> bool:
        try:
            return self.model in httpx2.get(f"{self.url}/v1/models", timeout=PATIENCE).text
        except httpx2.TransportError:
            return False

    def num_instances(self) -> int:
        """Workers that the frontend has heard of."""
        health = httpx2.get(f"{self.url}/health", timeout=PATIENCE).json()
        return sum(instance["endpoint"] == "generate" for instance in health.get("instances", []))


@contextmanager
def cluster(directory: Path, engine: Path, target: Path, *frontend_options: object) -> Iterator[Cluster]:
    running = Cluster(directory, engine, target, *frontend_options)
    try:
        yield running
    finally:
        running.close()


def terminate(worker: Worker) -> int:
    """Sends SIGTERM and returns the exit code."""
    worker.popen.send_signal(signal.SIGTERM)
    return worker.popen.wait(PATIENCE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
