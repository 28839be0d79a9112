# SPDX-License-Identifier: Apache-2.0
"""A server on a free loopback port, in this process; no wait is unbounded."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import httpx
from openai import OpenAI

from dflash_trt.llm import LLM
from dflash_trt.runtime.server.app import make_app
from dflash_trt.runtime.server.endpoints import Endpoints
from dflash_trt.runtime.server.http_server import HttpServer, bind
from dflash_trt.runtime.server.limits import ApiKeys
from dflash_trt.runtime.server.tracing import Tracing

MODEL = "tiny"
PATIENCE = 60.0
"""Seconds after which something hangs."""
Json = dict[str, Any]


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test, for PATIENCE at most."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fixtures), PATIENCE))

    return run


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def post(self, path: str = "/v1/completions", **body: object) -> httpx.Response:
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
        """Until every slot, every cached token and every admission is given back."""
        slots = self.llm.backend._decoder.slots
        until(lambda: not (self.endpoints.admission.active or self.llm.metrics().running or self.llm.metrics().waiting))
        assert (slots.free_slots, slots.free_tokens) == (slots.num_slots, slots.num_tokens)


@contextmanager
def serving(
    llm: LLM,
    *,
    keys: ApiKeys | None = None,
    origins: tuple[str, ...] = (),
    max_waiting: int = 256,
    max_bytes: int = 2**20,
    hosts: tuple[str, ...] | None = (),
    connection_limit: int = 1000,
    tracing: Tracing | None = None,
) -> Iterator[Live]:
    """The same server that `dflash-trt serve` starts, on a thread."""
    endpoints = Endpoints(llm.backend, MODEL, max_waiting=max_waiting, max_body_bytes=max_bytes, tracing=tracing)
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
