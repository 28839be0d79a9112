# SPDX-License-Identifier: Apache-2.0
"""Hostile and idle clients, failed steps and file limits: what one client can do to the others."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from uvicorn.server import ServerState

from dflash_trt.errors import EngineError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.server import endpoints
from dflash_trt.runtime.server.connections import acceptor, protocol, server
from dflash_trt.runtime.server.connections.sockets import max_connections
from dflash_trt.runtime.server.endpoints import DEGRADED_FAILURES
from tests.runtime.server.live import Live, bounded, read_response, serving
from tests.waiting import PATIENCE, until


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
    """At 5 s, which is httpx2's time, too, a hundredth of the requests that came then found theirs closing."""
    assert httpx2.Limits().keepalive_expiry < server.KEEP_ALIVE_SECONDS
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
    def failing(*_: Any) -> None:
        raise EngineError("found NaN or infinity")

    with monkeypatch.context() as patch:
        patch.setattr(type(live.llm.backend), "submit", failing)
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


def test_requests_have_ids(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="dflash_trt.runtime.server")
    assert live.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(live.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32
    until(lambda: "id abc-1" in caplog.text)
