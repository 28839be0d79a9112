# SPDX-License-Identifier: Apache-2.0
"""How a server ends: drained, at once, while loading, and when its decoder fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import FinishReason
from dflash_trt.errors import EngineError
from dflash_trt.runtime.server import http_server
from dflash_trt.runtime.server.http_server import HttpServer
from tests.cli.commands import run
from tests.runtime.server.live import LONG, PATIENCE, Live, children, refuses, started, until
from tests.runtime.server.test_soak import answer, post

NUM_SIGNALS = 50
NUM_STREAMS = 8
# For each line the command in a process of its own, with models that were loaded once: that alone takes seconds.
FORK = """
import os, sys
from pathlib import Path
from dflash_trt.cli import main
from dflash_trt.runtime import load

engine, target = sys.argv[1:]
session = load.open_session(Path(engine), target)
load.load_session = lambda pair, options, ranks: session
sys.modules["xgrammar"] = None  # what compiles grammars imports for 3 s, once a server
for line in sys.stdin:
    drain, log = line.split()
    if (child := os.fork()) == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = ["dflash-trt", "serve", engine, "--target", target, "--port", "0", "--drain-seconds", drain]
        main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forking(engine: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads do not survive a fork
    command = [sys.executable, "-c", FORK, str(engine), str(target)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(response: bytes) -> str:
    """Ending of one stream; AssertionError for one that breaks off."""
    if not response:
        return "no response"
    if response.startswith(b"HTTP/1.1 503 "):
        return "503"
    assert response.startswith(b"HTTP/1.1 200 "), response
    *_, last, done = re.findall(rb"data: (.*)\n", response)
    assert done == b"[DONE]", response
    document = json.loads(last)
    if "error" in document:
        assert "shutting down" in document["error"]["message"]
        return "error event"
    assert document["choices"][0]["finish_reason"] == "length"
    return "whole"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_every_client_is_told(engine: Path, chat_target: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    endings: Counter[str] = Counter()

    async def stream(url: str, max_tokens: int) -> None:
        body = json.dumps(LONG | {"max_tokens": max_tokens}).encode()
        try:
            response = await answer(url, post(body, "connection: close"))
        except ConnectionError:  # no longer accepted
            response = b""
        endings[ending(response)] += 1

    async def signal_during_streams(url: str, child: int, max_tokens: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(stream(url, max_tokens))
            await asyncio.sleep(draw.uniform(0, 0.3))
            os.kill(child, signal.SIGTERM)

    with forking(engine, chat_target) as process:
        for i in range(NUM_SIGNALS):
            log = tmp_path / f"{i}.log"
            process.stdin.write(f"{0 if i % 2 else 60} {log}\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            until(lambda log=log: log.exists() and "serving " in log.read_text())
            (url,) = re.findall(r"serving .* on (http://\S+)\n", log.read_text())
            until(lambda url=url: not refuses(url))
            asyncio.run(asyncio.wait_for(signal_during_streams(url, child, 2000 if i % 2 else 40), PATIENCE))
            assert process.stdout.readline() == "0\n", log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
    assert sum(endings.values()) == NUM_SIGNALS * NUM_STREAMS
    assert min(endings["whole"], endings["error event"]) > NUM_SIGNALS, endings
    assert endings["no response"] < NUM_SIGNALS, endings


def test_sigterm_lets_answers_end(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    """Without xgrammar, which processes that compile grammars import for 3 s."""
    start = ("-c", "import sys; sys.modules['xgrammar'] = None; from dflash_trt.cli import main; main()")
    with started(engine, chat_target, tmp_path / "log", "--served-model-name", "m", start=start) as process:
        url = process.await_url()
        assert process.text.index("loading ") < process.text.index("serving m on ")
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=LONG | {"max_tokens": 400}, timeout=PATIENCE
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.popen.send_signal(signal.SIGTERM)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert process.popen.wait(PATIENCE) == 0
        assert "Traceback" not in process.text
        assert "leaked" not in process.text
        assert "POST /v1/completions 200" in process.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_port_in_use_is_said_before_loading(engine: Path, chat_target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", engine, "--target", chat_target, "--port", port)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: --port: expected a free port on 127.0.0.1, found {port}: ")
    assert "loading" not in result.stderr


def test_what_is_no_engine_is_one_error(chat_target: Path, tmp_path: Path) -> None:
    result = run("serve", tmp_path, "--target", chat_target, "--port", 0)
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_after_the_drain_every_client_is_told(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    body, whole = LONG | {"max_tokens": 8000}, list[httpx.Response]()
    with started(engine, chat_target, tmp_path / "log", "--drain-seconds", 1) as process:
        url = f"{process.await_url()}/v1/completions"
        unstreamed = body | {"stream": False}
        post = threading.Thread(target=lambda: whole.append(httpx.post(url, json=unstreamed, timeout=PATIENCE)))
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            post.start()
            running = 'vllm:num_requests_running{engine="0",model_name="engine"} 2.0'
            until(lambda: running in httpx.get(url.replace("v1/completions", "metrics")).text)
            process.popen.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        post.join(PATIENCE)
        assert process.popen.wait(PATIENCE) == 0
        assert whole[0].status_code == 503
        assert events[-1] == "data: [DONE]"
        assert "shutting down" in events[-2]
        assert "Traceback" not in process.text


@pytest.mark.full
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_grammar_outlives_the_server(engine: Path, chat_target: Path, tmp_path: Path, end: signal.Signals) -> None:
    """Nor delays its end."""
    with started(engine, chat_target, tmp_path / "log", "--drain-seconds", 1) as process:
        url = process.await_url()

        def ask(text: str) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
            body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": text}}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            return connection

        assert ask("[a-z]{3}").getresponse().status == 200
        before = children(process.popen.pid)
        clients = [ask("a?" * 5000) for _ in range(3)]
        assert httpx.get(f"{url}/health").status_code == 200  # then what came before it has been read, too
        until(lambda: len(children(process.popen.pid)) == len(before) + 1)
        started_by_it = children(process.popen.pid)
        process.popen.send_signal(end)
        for client in clients:
            if end == signal.SIGTERM:
                assert client.getresponse().status == 503
            else:
                with pytest.raises(ConnectionError):
                    client.getresponse()
            client.close()
        assert process.popen.wait(PATIENCE) == (0 if end == signal.SIGTERM else -end)
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in started_by_it))
        assert "Traceback" not in process.text


@pytest.mark.full
def test_ranks_serve_as_one(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    """Answers do not change under torchrun; at SIGTERM, which reaches all, rank 0 drains and no rank stays behind."""
    body = LONG | {"max_tokens": 100, "stream": False}

    def served(*options: object, launcher: Sequence[str] = ()) -> str:
        start = (*launcher, "-m", "dflash_trt")
        with started(engine, chat_target, tmp_path / "log", "--draft-length", 7, *options, start=start) as process:
            answered = httpx.post(f"{process.await_url()}/v1/completions", json=body, timeout=PATIENCE)
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
    """Nor does a full disk behind stderr prevent the start."""
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
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
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

    async def closed(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise EngineError("expected an open LLM, found a closed one")
        yield

    monkeypatch.setattr(type(live.llm.backend), "is_alive", property(lambda _: False))
    monkeypatch.setattr(type(live.llm.backend), "stream", closed)
    response = live.post(prompt="x", max_tokens=1, stream=stream)
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert "the server is shutting down" in response.text


def test_what_the_end_of_the_drain_cancels_is_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = type(live.llm.backend).stream

    async def cancelled(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        yield Chunk(text="a", token_ids=[5], completion=None)  # the stream has begun
        async for chunk in stream(*args, **options):
            completion = chunk.completion and replace(chunk.completion, finish_reason=FinishReason.CANCELLED)
            yield replace(chunk, completion=completion)

    monkeypatch.setattr(type(live.llm.backend), "stream", cancelled)
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
        listening = http_server.bind("127.0.0.1", 0)
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
        assert len(children(process.popen.pid)) == 2  # what compiles grammars imports meanwhile
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(PATIENCE) == 0
        assert "Traceback" not in process.text


@pytest.mark.full
def test_a_decoder_that_fails_ends_the_process(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    """A supervisor restarts it; what ran out is the last line."""
    script = (
        "from dflash_trt.cli import main\n"
        "from dflash_trt.runtime.decoder import Decoder\n"
        "def step(self): raise MemoryError('26853376 bytes')\n"
        "Decoder.step = step\n"
        "main()\n"
    )
    with started(engine, chat_target, tmp_path / "log", start=("-c", script)) as process:
        url = process.await_url()
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
        assert response.status_code == 500
        assert process.popen.wait(PATIENCE) == 1
        assert "the decoder has failed: 26853376 bytes" in process.text
