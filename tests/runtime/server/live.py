# SPDX-License-Identifier: Apache-2.0
"""A server on a free loopback port: in this process, or `dflash-trt serve` in its own; no wait is unbounded."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import httpx2
from openai import DefaultHttpxClient, OpenAI

from dflash_trt.llm import LLM
from dflash_trt.runtime.server.access import ApiKeys
from dflash_trt.runtime.server.app import make_app
from dflash_trt.runtime.server.connections.server import HttpServer
from dflash_trt.runtime.server.connections.sockets import bind
from dflash_trt.runtime.server.endpoints import Endpoints
from dflash_trt.runtime.server.telemetry.tracing import Tracing
from tests.waiting import PATIENCE, until

MODEL = "tiny"
CERTIFICATES = ssl.create_default_context()
"""All clients share them, because reading them takes 25 ms."""
Json = dict[str, Any]


LONG = {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
"""Seconds of work: it still runs when a test looks."""


class Process:
    """A server that has been started."""

    def __init__(
        self, engine: Path, target: Path, log: Path, *options: object, start: Sequence[str] = ("-m", "dflash_trt")
    ) -> None:
        self.log = log
        arguments = ["serve", engine, "--target", target, "--port", 0, *options]
        with log.open("wb") as file:
            command = [sys.executable, *start, *map(str, arguments)]
            self.popen = subprocess.Popen(command, env=os.environ, stdout=file, stderr=file)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def await_url(self) -> str:
        """Address where it serves, once it does."""
        self.await_log(r"target: .* on cpu: (?s:.*)serving .* on http://\S+\n")
        (url,) = re.findall(r"serving .* on (http://\S+)\n", self.text)
        assert not refuses(url), self.text
        return str(url)

    def await_log(self, pattern: str) -> None:
        def is_there() -> bool:
            found = re.search(pattern, self.text) is not None
            assert found or self.popen.poll() is None, self.text
            return found

        until(is_there, lambda: self.text)


@contextmanager
def started(engine: Path, target: Path, log: Path, *options: object, **how: Sequence[str]) -> Iterator[Process]:
    process = Process(engine, target, log, *options, **how)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def refuses(url: str) -> bool:
    try:
        httpx2.get(f"{url}/health", timeout=PATIENCE, verify=CERTIFICATES)
    except httpx2.TransportError:
        return True
    return False


def children(pid: int) -> list[int]:
    """Children of a process, and theirs; a thread that ends meanwhile has none."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test, for PATIENCE at most."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), PATIENCE))

    return run


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


class Live:
    """A running server, and ways to ask it."""

    def __init__(self, llm: LLM, port: int, endpoints: Endpoints) -> None:
        self.llm = llm
        self.port = port
        self.endpoints = endpoints
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE, verify=CERTIFICATES)

    def openai(self, key: str = "none") -> OpenAI:
        http = DefaultHttpxClient(verify=CERTIFICATES)
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, http_client=http)

    def post(self, path: str = "/v1/completions", **body: object) -> httpx2.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: object) -> Json:
        response = self.post(**body)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def events(self, path: str = "/v1/completions", **body: object) -> list[Json]:
        """The documents of a streamed answer, each of its frames checked."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *frames, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def await_idle(self) -> None:
        """Waits until every slot, every cached token and every admission is given back."""
        held = (self.endpoints.admission, self.endpoints.answers)
        until(
            lambda: not (any(each.active for each in held) or self.llm.metrics().running or self.llm.metrics().waiting)
        )
        backend, metrics = self.llm.backend, self.llm.metrics()
        assert (metrics.free_slots, metrics.free_cache_tokens) == (backend.max_batch_size, backend.num_cache_tokens)


@contextmanager
def serving(
    llm: LLM,
    *,
    keys: ApiKeys | None = None,
    origins: tuple[str, ...] = (),
    max_waiting: int = 256,
    max_bytes: int = 2**20,
    max_answer_bytes: int = 2**30,
    hosts: tuple[str, ...] | None = (),
    connection_limit: int = 1000,
    tracing: Tracing | None = None,
) -> Iterator[Live]:
    """A server as `dflash-trt serve` starts it, on a thread."""
    endpoints = Endpoints(
        llm.backend, MODEL, max_waiting=max_waiting, max_body_bytes=max_bytes,
        max_answer_bytes=max_answer_bytes, tracing=tracing,
        target="openai/tiny-gpt-oss", draft="z-lab/tiny-gpt-oss-DFlash",
    )  # fmt: skip
    listening = bind("127.0.0.1", 0)
    app = make_app(endpoints, keys=keys, origins=origins, hosts=hosts)
    server = HttpServer(app, drain_seconds=5, cancel_all=endpoints.shut_down, connection_limit=connection_limit)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    until(lambda: server.started)
    live = Live(llm, listening.getsockname()[1], endpoints)
    try:
        yield live
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()
        assert not thread.is_alive()
