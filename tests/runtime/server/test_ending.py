# SPDX-License-Identifier: Apache-2.0
"""How a server ends: drained, at once, while loading, and when its decoder fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import FinishReason
from dflash_trt.errors import EngineError
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.server.connections import server as http_server
from dflash_trt.runtime.server.connections.server import HttpServer
from dflash_trt.runtime.server.connections.sockets import bind
from dflash_trt.runtime.server.telemetry import log as server_log
from tests.cli.commands import run, run_here
from tests.runtime.server.live import CERTIFICATES, LONG, Live, children, refuses, started
from tests.waiting import PATIENCE, until

Serve = Callable[..., list[str]]


@pytest.fixture
def serve(engine: Path, chat_target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Runs `serve` in this process, on the thread that signals reach, and a client of it on another.

    The client gets the server's URL, and what sends SIGTERM once.
    """
    said: list[str] = []
    monkeypatch.setattr(import_module("dflash_trt.cli.serve"), "_say", said.append)
    monkeypatch.setattr(server_log, "set_up_logging", lambda: None)
    monkeypatch.setattr(http_server, "exit_on_sigterm", nullcontext)  # it would end pytest

    def run_serve(client: Callable[[str, Callable[[], None]], None], *options: object) -> list[str]:
        signals = iter([signal.SIGTERM])

        def stop() -> None:
            for number in signals:
                os.kill(os.getpid(), number)

        def ask() -> None:
            try:
                until(lambda: any(line.startswith("serving ") for line in said))
                url = said[-1].rpartition(" ")[2]
                until(lambda: not refuses(url))
                client(url, stop)
            except BaseException:
                stop()
                raise

        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            run_here("serve", engine, "--target", chat_target, "--port", 0, *options)
            asked.result(PATIENCE)
        return said

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield run_serve
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("drain_seconds", "max_tokens"), [(60, 150), (0, 8000)])
def test_sigterm_drains(serve: Serve, drain_seconds: int, max_tokens: int) -> None:
    """Answers that finish in time are whole; after it, every client gets an error."""
    body, whole, events = LONG | {"max_tokens": max_tokens}, list[httpx2.Response](), list[str]()

    def client(url: str, stop: Callable[[], None]) -> None:
        post = threading.Thread(
            target=lambda: whole.append(
                httpx2.post(f"{url}/v1/completions", json=body | {"stream": False}, timeout=PATIENCE)
            )
        )
        post.start()
        running = 'vllm:num_requests_running{engine="0",model_name="m"} 1'
        until(lambda: bool(whole) or running in httpx2.get(f"{url}/metrics", verify=CERTIFICATES).text)
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()  # without a reference to it the connection is closed
            events.append(next(lines))
            stop()
            events.extend(line for line in lines if line)
        post.join(PATIENCE)
        until(lambda: refuses(url))  # the answers may end before the server's thread gets the signal

    said = serve(client, "--served-model-name", "m", "--drain-seconds", drain_seconds)
    assert [line.partition(" ")[0] for line in said] == ["loading", "target:", "serving"]
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    if drain_seconds:
        assert (whole[0].status_code, last["choices"][0]["finish_reason"]) == (200, "length")
    else:
        assert (whole[0].status_code, last["error"]["message"]) == (503, "the server is shutting down")


def test_a_decoder_that_fails_ends_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor restarts it; what ran out is in the command's error."""

    def fail(self: Decoder) -> None:
        raise MemoryError("26853376 bytes")

    def client(url: str, stop: Callable[[], None]) -> None:
        assert httpx2.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE).status_code == 500
        until(lambda: refuses(url))

    monkeypatch.setattr(Decoder, "step", fail)
    with pytest.raises(EngineError, match="the decoder has failed: 26853376 bytes"):
        serve(client)


def test_a_port_in_use_is_said_before_loading(engine: Path, chat_target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", engine, "--target", chat_target, "--port", port)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: port {port} on 127.0.0.1 is already in use\n")
    assert "loading" not in result.stderr


@pytest.mark.full
def test_ranks_serve_as_one(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    """Answers do not change under torchrun; at SIGTERM, which reaches all, rank 0 drains and every rank ends."""
    body = LONG | {"max_tokens": 100, "stream": False}

    def served(*options: object, launcher: Sequence[str] = ()) -> str:
        start = (*launcher, "-m", "dflash_trt")
        with started(engine, chat_target, tmp_path / "log", "--draft-length", 7, *options, start=start) as process:
            answered = httpx2.post(f"{process.await_url()}/v1/completions", json=body, timeout=PATIENCE)
            started_by_it = children(process.popen.pid)
            process.popen.send_signal(signal.SIGTERM)
            process.popen.wait(PATIENCE)
            until(lambda: not any(Path(f"/proc/{child}").exists() for child in started_by_it))
            assert "error: " not in process.text
        return str(answered.json()["choices"][0]["text"])

    one = served()
    assert len(one) > 100
    assert served("--tp", 2, launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2")) == one


@pytest.mark.full
def test_a_second_sigterm_ends_at_once(engine: Path, chat_target: Path) -> None:
    """A full disk under stderr does not prevent the start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "dflash_trt", "serve", str(engine), "--target", str(chat_target), "--port", str(port)]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen([sys.executable, *command], stdout=full, stderr=full)
    url = f"http://127.0.0.1:{port}"
    try:

        def is_up() -> bool:
            assert process.poll() is None
            return not refuses(url)

        until(is_up)
        body = LONG | {"max_tokens": 8000}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()  # without a reference to it the connection is closed
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            until(lambda: refuses(url))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_meets_the_end_of_the_drain_is_told(
    live: Live, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was admitted before, and reaches the decoder when that has been closed."""

    def closed(*_: Any) -> None:
        raise EngineError("this LLM is closed")

    monkeypatch.setattr(type(live.llm.backend), "is_alive", property(lambda _: False))
    monkeypatch.setattr(type(live.llm.backend), "submit", closed)
    response = live.post(prompt="x", max_tokens=1, stream=stream)
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert "the server is shutting down" in response.text


def test_what_the_end_of_the_drain_cancels_is_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    make_request = type(live.llm.backend).request

    def cancelled(backend: Any, prompt: Any, params: Any, put: Any, **options: Any) -> Any:
        def put_cancelled(chunk: Any) -> None:
            completion = chunk.completion and replace(chunk.completion, finish_reason=FinishReason.CANCELLED)
            put(replace(chunk, completion=completion))

        put(Chunk(text="a", token_ids=[5], completion=None))  # the stream has begun
        return make_request(backend, prompt, params, put_cancelled, **options)

    monkeypatch.setattr(type(live.llm.backend), "request", cancelled)
    assert live.post(prompt="x", max_tokens=1).status_code == 503
    *_, last = live.events(prompt="x", max_tokens=1)
    assert last["error"]["message"] == "the server is shutting down"


def test_the_drain_has_an_end_and_a_second_signal_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    is_running, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        is_running.set()
        await may_end.wait()
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def drain() -> bytes:
        loop = asyncio.get_running_loop()
        listening = bind("127.0.0.1", 0)
        server = HttpServer(app, drain_seconds=0, cancel_all=lambda: loop.call_soon_threadsafe(may_end.set))
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await is_running.wait()
        exits: list[int] = []
        monkeypatch.setattr(os, "_exit", exits.append)
        server.handle_exit(signal.SIGTERM, None)
        assert (server.should_exit, exits) == (True, [])
        server.handle_exit(signal.SIGTERM, None)
        assert exits == [128 + signal.SIGTERM]
        async with asyncio.timeout(PATIENCE):
            await serving
        writer.close()
        return await reader.read(100)

    assert asyncio.run(drain()).startswith(b"HTTP/1.1 503 ")


def test_sigterm_while_loading(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    with started(engine, chat_target, tmp_path / "log") as process:
        process.await_log("loading ")
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(PATIENCE) == 0
        assert "Traceback" not in process.text
