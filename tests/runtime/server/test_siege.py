# SPDX-License-Identifier: Apache-2.0
"""Hostile and slow clients, damaged weights, file limits: what a client can do to the others."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from dflash_trt.errors import EngineError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.server import endpoints, event_stream, tokenizing
from dflash_trt.runtime.server.connections import acceptor, protocol, server
from dflash_trt.runtime.server.connections.sockets import max_connections
from dflash_trt.runtime.server.endpoints import DEGRADED_FAILURES
from dflash_trt.runtime.server.event_stream import EventStream
from dflash_trt.runtime.server.log import MAX_QUEUED_LINES, NonBlockingHandler
from dflash_trt.runtime.server.tokenizing import CHUNK_CHARACTERS, TokenizerPool
from tests.cli.commands import run_here
from tests.runtime.server.live import Live, bounded, read_response, serving
from tests.waiting import PATIENCE, until

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class CountingTokenizer:
    """The real one, which counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0
        self.on_call: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: object) -> CountingTokenizer:
        return self

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        self.on_call()
        return self._tokenizer(text, **options)

    def get_vocab(self) -> Any:
        return self._tokenizer.get_vocab()


def test_a_long_prompt_is_tokenised_up_to_the_limit(live: Live) -> None:
    """One of too many characters not at all."""
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 100)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"prompt: \d+ characters are more than 100 tokens"):
        asyncio.run(pool.encode("x" * (pool.max_characters + 1)))
    assert tokenizer.num_characters == 0
    pool = TokenizerPool(tokenizer, 2 * CHUNK_CHARACTERS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"prompt: it has more than .* tokens"):
        asyncio.run(pool.encode("é1" * 3 * CHUNK_CHARACTERS))
    assert tokenizer.num_characters <= 4 * CHUNK_CHARACTERS
    text = "def f(x): return x + 1\n" * (CHUNK_CHARACTERS // 20)
    assert asyncio.run(pool.encode(text)) == live.llm.backend.encode(text)


@bounded
async def test_clients_take_turns_at_tokenising(live: Live) -> None:
    """At most one of ten prompts of one client is tokenised before another client's."""
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE)

    tokenizer.on_call = wait
    many = [asyncio.create_task(pool.encode("x", client="many")) for _ in range(10)]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    few = asyncio.create_task(pool.encode("y", client="few"))
    await asyncio.sleep(0)
    ended: list[asyncio.Task[list[int]]] = []
    for task in (*many, few):
        task.add_done_callback(ended.append)
    may_go_on.set()
    await asyncio.gather(*many, few)
    assert ended.index(few) == 1


def test_the_tokenizers_time_is_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TOKENIZER_SECONDS", 0.0)
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt: the tokenizer takes more than 0 s"):
        asyncio.run(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    assert tokenizer.num_characters == CHUNK_CHARACTERS, "one chunk"


@bounded
async def test_tokenising_ends_with_the_client(live: Live) -> None:
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE)

    tokenizer.on_call = wait
    task = asyncio.create_task(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    may_go_on.set()
    last = "x " * CHUNK_CHARACTERS  # on the same thread, so after the first: counted, then tokenised
    await pool.encode(last)
    assert tokenizer.num_characters == CHUNK_CHARACTERS + 2 * len(last)


async def documents(number: int, ended: list[int]) -> AsyncGenerator[dict[str, Any], None]:
    try:
        for i in range(number):
            yield {"index": i, "text": "x" * 1000}
            await asyncio.sleep(0)
    finally:
        ended.append(1)


async def read_slowly(number: int, *, ticks: int = 0) -> tuple[bool, bytes]:
    """Whether the documents came to an end before the client read any, and what it got then.

    With `ticks` it reads meanwhile: one document every `ticks` turns of the event loop.
    """
    ended: list[int] = []
    may_read, sent = asyncio.Event(), b""

    async def send(message: Any) -> None:
        nonlocal sent
        await may_read.wait()
        for _ in range(ticks):
            await asyncio.sleep(0)
        sent += message.get("body", b"")

    async def receive() -> dict[str, str]:
        return await asyncio.get_running_loop().create_future()

    if ticks:
        may_read.set()
    response = asyncio.create_task(EventStream(documents(number, ended))({"dflash_trt.log_fields": {}}, receive, send))
    for _ in range(10 * number):
        await asyncio.sleep(0)
    is_computed = bool(ended)
    may_read.set()
    await response
    return is_computed, sent


@pytest.mark.parametrize("limit", [None, "MAX_UNREAD_BYTES", "MAX_ALL_UNREAD_BYTES"])
def test_an_unread_response(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its place back, and is cut at a limit."""
    if limit is not None:
        monkeypatch.setattr(event_stream, limit, 10_000)
    is_computed, sent = asyncio.run(read_slowly(50))
    assert is_computed
    assert sent.count(b'"index"') == 50 if limit is None else sent.count(b'"index"') < 11
    assert (b"the client is too slow" in sent) == (limit is not None)
    assert sent.endswith(b"data: [DONE]\n\n")
    assert EventStream.all_unread_bytes == 0


def test_what_was_read_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the documents are unread when the last one comes: fewer bytes than the limit, as all are more."""
    monkeypatch.setattr(event_stream, "MAX_UNREAD_BYTES", 40_000)
    assert asyncio.run(read_slowly(50, ticks=2))[1].count(b'"index"') == 50


@bounded
async def test_a_client_that_leaves_is_not_counted_any_more() -> None:
    ended: list[int] = []

    async def send(message: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, str]:
        while not ended:
            await asyncio.sleep(0)
        assert EventStream.all_unread_bytes > 50_000
        return {"type": "http.disconnect"}

    await EventStream(documents(50, ended))({"dflash_trt.log_fields": {}}, receive, send)
    assert EventStream.all_unread_bytes == 0


class Transport(asyncio.Transport):
    """One whose client reads nothing."""

    is_aborted = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("reads_again", [False, True])
@bounded
async def test_a_client_that_does_not_read_is_disconnected(reads_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.01)
    transport = Transport()
    config = uvicorn.Config(lambda: None, log_config=None, access_log=False)  # type: ignore[arg-type]
    connection = protocol.Protocol(config, ServerState(), {})
    connection.connection_made(transport)
    connection.pause_writing()
    if reads_again:
        connection.resume_writing()
    await asyncio.sleep(0.1)
    assert transport.is_aborted is not reads_again


def test_the_next_request_of_a_connection_has_a_time_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as live, live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
        connection.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_connections_beyond_the_limit_wait(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with serving(llm, connection_limit=3) as live:
        held = [live.connect() for _ in range(6)]
        until(lambda: "new connections wait" in caplog.text)
        request = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        for connection in held:
            connection.sendall(request)
        for connection in held:
            with connection:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert sum("new connections wait" in record.getMessage() for record in caplog.records) <= 6


def test_idle_connections_make_room(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(llm, connection_limit=3) as live:
        connections = []
        for _ in range(8):
            connections.append(connection := live.connect())
            connection.sendall(request)
            assert read_response(connection)[0] == 200
        for connection in connections[:5]:  # the longest idle ones
            assert connection.recv(1000) == b""
        connections[-1].sendall(request)
        assert read_response(connections[-1])[0] == 200
        for connection in connections:
            connection.close()
    assert "new connections wait" not in caplog.text


def test_clients_close_idle_connections_before_the_server_does(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 5 s, which is httpx's time, too, a hundredth of the requests that came then found theirs closing."""
    assert httpx.Limits().keepalive_expiry < server.KEEP_ALIVE_SECONDS
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.1)
    with serving(llm) as live, live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_response(connection)[0] == 200
        assert connection.recv(1000) == b""


def test_a_failed_accept_is_said_once_and_tried_again(
    llm: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3
    accept = asyncio.SelectorEventLoop.sock_accept

    async def fail_then_accept(loop: Any, listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(loop, listening)

    monkeypatch.setattr(acceptor, "ACCEPT_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", fail_then_accept)
    with serving(llm) as live:
        assert live.http.get("/health").status_code == 200
    assert caplog.messages.count("new connections wait: Too many open files") == 1


def test_without_room_for_connections_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(RequestError, match="the limit of open files is 20; the server needs "):
        max_connections()


def test_stop_texts_and_prompts_are_bounded(live: Live) -> None:
    for field, value in (
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop_token_ids", list(range(1025))),
        ("prompt", [1] * 10**5),
        ("prompt", ["x"] * 10**4),
        ("prompt", [[1] * 10**5]),
    ):
        response = live.post(**{"prompt": "x", "max_tokens": 1, field: value})
        assert response.status_code == 400, field
        assert response.json()["error"]["message"].startswith(f"{field}: expected at most ")


def test_a_500_keeps_the_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(live.llm.backend), "max_length", property(lambda _: 1 / 0))
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=PATIENCE)
    for method, path, status in (("POST", "/v1/completions", 500), ("GET", "/version", 200)):
        connection.request(method, path, b'{"prompt": "x"}', {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert (response.status, response.will_close) == (status, False)
    connection.close()


def test_a_body_that_breaks_off_after_its_response(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert read_response(connection)[0] == 200
        connection.sendall(b"not a chunk\r\n")
        assert connection.recv(1000) == b""
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_errors_of_libraries_are_lines_of_the_log() -> None:
    """Python's own handler writes at once, to a reader that may not read."""
    code = "import logging; from dflash_trt.runtime.server.log import set_up_logging; set_up_logging(); "
    code += "logging.getLogger('asyncio').error('an error'); logging.getLogger().handlers[0].flush()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[-0-9]+ [:0-9]+ an error\n", run.stderr)


def test_an_unread_log_loses_lines() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):  # ends when the pipe is full
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    handler = NonBlockingHandler(writing)
    for i in range(2 * MAX_QUEUED_LINES):
        handler.handle(logging.LogRecord("x", logging.INFO, "x", 1, f"line {i} {'x' * 200}", None, None))
    assert handler.num_dropped > 0
    os.close(reading)  # the thread's write ends with an error, and it goes on
    handler.flush()
    assert handler.is_idle


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "tool_calls": 5}],
        [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "tool_calls": [5]}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {}}]}],
    ],
    ids=str,
)
def test_errors_of_a_template_are_400(live: Live, messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{{ t.function.name | upper + t['function'].x.y }}"
        "{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(live.llm.backend.tokenizer, "chat_template", template)
    response = live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"messages[{len(messages) - 1}]: ")


def test_the_host_is_checked(llm: LLM, live: Live) -> None:
    with serving(llm, hosts=("proxy.example",)) as named:
        for host, status in (
            ("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:8", 200), ("proxy.example", 200), ("a.example", 403),
            ("127.0.0.1.a.example", 403), ("localhost.a.example", 403), ("notlocalhost", 403), ("", 403),
        ):  # fmt: skip
            assert named.http.get("/v1/models", headers={"host": host}).status_code == status, host
    with serving(llm, hosts=None) as public:
        assert public.http.get("/v1/models", headers={"host": "a.example"}).status_code == 200


def test_a_step_that_does_not_end_degrades_health(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank looks like this; an idle server is healthy, however long it waits."""
    monkeypatch.setattr(endpoints, "STALLED_SECONDS", 0.0)
    live.await_idle()
    until(lambda: live.llm.backend.step_seconds == 0)
    assert live.http.get("/health").status_code == 200
    step, begun, may_go_on = Decoder.step, threading.Event(), threading.Event()

    def stop(decoder: Decoder) -> None:
        begun.set()
        assert may_go_on.wait(PATIENCE)
        step(decoder)

    monkeypatch.setattr(Decoder, "step", stop)
    request = threading.Thread(target=live.post, kwargs={"prompt": "x", "max_tokens": 4})
    request.start()
    assert begun.wait(PATIENCE)
    response = live.http.get("/health")
    assert (response.status_code, response.text) == (503, "stalled: the current step has taken 0 s")
    may_go_on.set()
    request.join(PATIENCE)
    until(lambda: live.http.get("/health").status_code == 200)


def test_failures_in_a_row_degrade_health(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise EngineError("found NaN or infinity")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(type(live.llm.backend), "stream", failing)
        for _ in range(DEGRADED_FAILURES):
            assert live.http.get("/health").status_code == 200
            assert live.post(prompt="x", max_tokens=1).status_code == 500
    response = live.http.get("/health")
    assert (response.status_code, response.text[:8]) == (503, "degraded")
    live.complete(prompt="x", max_tokens=1)
    assert live.http.get("/health").status_code == 200


def test_a_cache_without_room_for_a_page_is_one_error(engine: Path, chat_target: Path) -> None:
    with (
        LLM(engine, chat_target, cache_gib=1e-9) as llm,
        pytest.raises(RequestError, match="cache_gib: expected room for at least 2 tokens, found 0"),
        serving(llm),
    ):
        pass


@pytest.mark.parametrize("size", ["nan", "1e308", "0", "-1"])
def test_sizes_of_bodies_are_checked(size: str) -> None:
    with pytest.raises(click.BadParameter, match="expected more than 0 and at most 1024 MiB"):
        run_here("serve", "engine", "--target", "target", "--max-body-mib", size)


def test_requests_have_ids(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dflash_trt.runtime.server")
    assert live.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(live.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32
    until(lambda: "id abc-1" in caplog.text)
