# SPDX-License-Identifier: Apache-2.0
"""API keys, limits, and requests whose client has left."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import ConfigError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.server.access import ApiKeys
from dflash_trt.runtime.server.client_limits import Admission
from dflash_trt.runtime.server.connections import parser, protocol
from dflash_trt.runtime.server.connections.sockets import bind
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.request import body as request_body
from tests.runtime.server.live import LONG, Live, read_response, serving
from tests.waiting import PATIENCE, until

HEAD = b"POST /%b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"


def test_one_client_leaves_places_to_others() -> None:
    admission = Admission(16)
    with admission.admit(14, "one"):
        with pytest.raises(HttpError, match="14 sequences of this client") as error, admission.admit(1, "one"):
            pass
        assert error.value.status == 429
        with admission.admit(2, "other"), pytest.raises(HttpError, match="16 of 16"), admission.admit(1, "third"):
            pass
    assert admission.active == 0
    assert not admission.by_client


@pytest.mark.parametrize("path", [b"v1/completions", b"tokenize"])
def test_bodies_in_memory_are_bounded(live: Live, path: bytes) -> None:
    """All clients' together and each one's, before any of a body is read."""

    def announce(client: int) -> socket.socket:
        source = (f"127.0.0.{client}", 0)
        connection = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE, source_address=source)
        connection.sendall(HEAD % path)
        return connection

    def is_refused(client: int) -> bool:
        with announce(client) as connection:
            return connection.recv(100).startswith(b"HTTP/1.1 429 ")

    held = [announce(1) for _ in range(request_body.CONCURRENT_BODIES - 1)]
    until(lambda: live.endpoints.bodies.active == 1000000 * len(held))
    assert is_refused(1)
    held.append(announce(2))
    until(lambda: live.endpoints.bodies.active == 1000000 * len(held))
    assert is_refused(3)
    assert live.complete(prompt="x", max_tokens=1)
    for connection in held:
        connection.close()
    until(lambda: live.endpoints.bodies.active == 0)
    assert not live.endpoints.bodies.by_client


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def await_running(live: Live, number: int) -> None:
    until(lambda: live.llm.metrics().running >= number)


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_the_slot(live: Live, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"{POST.decode()}content-length: {len(body)}"
    cancelled = live.llm.metrics().finished.get("cancelled", 0)  # type: ignore[call-overload]
    with live.connect() as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        await_running(live, 1)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            assert live.endpoints.admission.active == 1
    live.await_idle()
    finished = live.llm.metrics().finished
    assert finished.get("cancelled", 0) == cancelled + 1  # type: ignore[call-overload]


def test_who_goes_away_before_the_body_is_whole(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(POST)
        connection.sendall(b"content-length: 100\r\n\r\n{")
    live.await_idle()
    assert live.http.get("/health").status_code == 200


def test_a_slow_reader_stalls_no_other_client(live: Live) -> None:
    body = json.dumps({**LONG, "return_steps": True}).encode()
    with live.connect() as connection:
        connection.sendall(POST)
        connection.sendall(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await_running(live, 1)
        assert live.complete(prompt="def f(", max_tokens=8)["usage"]["completion_tokens"] <= 8


def test_the_queue_is_limited(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may_step, step = threading.Event(), Decoder.step

    def held_step(decoder: Decoder) -> None:
        assert may_step.wait(PATIENCE)
        step(decoder)

    monkeypatch.setattr(Decoder, "step", held_step)
    with serving(llm, max_waiting=1) as live:
        body = LONG | {"max_tokens": 30, "stream": False}
        held = [threading.Thread(target=live.post, kwargs=body) for _ in range(5)]
        for thread in held:
            thread.start()
        until(lambda: live.endpoints.admission.active == 5)
        response = live.post(prompt="x", max_tokens=1)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["type"] == "rate_limit_error"
        may_step.set()
        for thread in held:
            thread.join(PATIENCE)
        assert live.post(prompt="x", max_tokens=1).status_code == 200


def test_clients_take_turns(live: Live) -> None:
    """Another client's request ends before one of eight that came earlier, twice as many as there are slots."""
    held = [threading.Thread(target=live.post, kwargs=LONG | {"max_tokens": 300, "n": 8, "stream": False})]
    held[0].start()
    await_running(live, 4)
    with httpx2.Client(transport=httpx2.HTTPTransport(local_address="127.0.0.2"), timeout=PATIENCE) as other:
        answer = other.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 8})
        assert answer.status_code == 200
    assert live.endpoints.admission.active == 8
    held[0].join(PATIENCE)


def test_bodies_are_limited(live: Live) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"x" * 2**16

    headers = {"content-type": "application/json"}
    for content in (b"x" * (2**20 + 1), parts()):
        response = live.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413, response.text
        assert "1048576 bytes" in response.json()["error"]["message"]
    with live.connect() as connection:  # it is the announced length that is refused, before any of it comes
        connection.sendall(POST)
        connection.sendall(b"content-length: 999999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_headers_are_limited(live: Live) -> None:
    """6,000 of them, again and again by two clients, made others wait forty times as long."""

    def request(*headers: bytes) -> bytes:
        body = b'{"prompt": "x", "max_tokens": 1' + b"\n" * 200 + b"}"
        return POST + b"content-length: %d\r\n" % len(body) + b"".join(headers) + b"\r\n" + body

    many = [b"x-%d: y\r\n" % number for number in range(97)]
    with live.connect() as connection:
        connection.sendall(request(*many))
        assert read_response(connection)[0] == 200
    for headers, found in (
        ([*many, b"a: b\r\n"], b"found 101 in "),
        ([b"x: %b\r\n" % (b"y" * 20000)], b"found 4 in 20"),
        ([b"x: y\r\n"] * 2000, b"found 2003 in "),
    ):
        with live.connect() as connection:
            connection.sendall(request(*headers))
            status, message = read_response(connection)
            assert status == 400
            assert message.startswith(b"headers: expected at most 100 in 16384 bytes, " + found)
    with live.connect() as connection:
        connection.sendall(POST + b"x: " + b"y" * 16384)  # without an end
        assert read_response(connection)[1].endswith(b", found no end after %d bytes" % (len(POST) + 3 + 16384))


def test_trailers_are_limited(live: Live) -> None:
    body = b'{"prompt": "x", "max_tokens": 1' + b"\n" * 200 + b"}"
    none = POST + b"transfer-encoding: chunked\r\n\r\n"
    chunks = none + b"%x\r\n%b\r\n" % (len(body), body)
    few, many, endless = b"x: y\r\n" * 100, b"x: y\r\n" * 101 + b"\r\n", b"x: y\r\n" * 3000
    with live.connect() as connection:
        for pieces in ([chunks + b"0\r\n" + few + b"\r\n"], [chunks, b"0", b"00;x\r\n", few, b"\r\n"]):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)  # one that comes alone: without, the test may see less
            assert read_response(connection)[0] == 200
    for pieces in ([chunks + b"0" * 20 + b"\r\n" + many], [none, b"0\r\n", many], [chunks, b"00\r\n", endless]):
        with live.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)
            status, message = read_response(connection)
            assert (status, message[:8]) == (400, b"headers:")


def test_small_chunks_are_limited(live: Live) -> None:
    """One byte each, in two connections, they kept others waiting for 26 s."""

    def chunks(sizes: list[int]) -> bytes:
        text = b'{"max_tokens": 1, "prompt": "x"}'.ljust(sum(sizes))
        parts = [b"%x\r\n%b\r\n" % (size, text[sum(sizes[:i]) :][:size]) for i, size in enumerate(sizes)]
        return POST + b"transfer-encoding: chunked\r\n\r\n" + b"".join(parts)

    small = [1] * (parser.SMALL_CHUNKS - 10)
    with live.connect() as connection:
        for sizes in (small, small, [4000, *small, *[1] * 20]):
            connection.sendall(chunks(sizes) + b"0\r\n\r\n")
            assert read_response(connection)[0] == 200
    with live.connect() as connection:
        connection.sendall(chunks([*small, *[1] * 20]))
        message = b"body: expected chunks of at least 256 bytes, found 1029 in 1029 bytes"
        assert read_response(connection) == (400, message)


def test_what_does_not_arrive_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.2)
    with serving(llm) as live:
        for sent in (b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nhost: localhost\r\nx-slow: 1"):
            with live.connect() as connection:
                connection.sendall(sent)
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        with live.connect() as connection:
            connection.sendall(POST)
            connection.sendall(b"content-length: 10\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert live.http.get("/health").status_code == 200


def test_keys(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# ours\nfirst-key\n\nsecond-key\n")
    with serving(llm, keys=ApiKeys.read(file)) as live:
        for key in ("first-key", "second-key"):
            assert live.openai(key).models.list().data
        for key in ("third-key", "first-ke", "# ours", "first-key2"):
            with pytest.raises(openai.AuthenticationError, match="authorization: unknown API key"):
                live.openai(key).completions.create(model="tiny", prompt="x")
        for path, status in (
            ("/", 200),
            ("/page/page.js", 200),
            ("/health", 200),
            ("/docs", 200),
            ("/openapi.json", 200),
            ("/metrics", 401),
            ("/version", 401),
            ("/pagex", 401),
            ("/x/health", 401),
        ):
            assert live.http.get(path).status_code == status
        assert live.http.get("/page/../v1/models").status_code == 401
        assert live.http.get("/v1/models", headers={"authorization": "Basic first-key"}).status_code == 401
        assert "first-key" not in live.http.get("/v1/models").text


def test_a_file_without_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    for content, found in ((b"# none\n", "contains no API key"), (b"\xff", "not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=found):
            ApiKeys.read(file)
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys.read(tmp_path / "nothing")


def test_other_origins_may_ask_only_where_they_are_named(llm: LLM, live: Live) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    response = live.http.options("/v1/completions", headers=asked)
    assert not [name for name in response.headers if name.startswith("access-control")]
    with serving(llm, origins=("https://a.example",), keys=ApiKeys(["k"])) as named:
        response = named.http.options("/v1/completions", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        other = named.http.options("/v1/completions", headers=asked | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_log_has_no_prompts(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dflash_trt.runtime.server")
    live.complete(prompt="secret words", max_tokens=4, temperature=0)
    live.http.get("/%0aforged?secret=words")
    until(lambda: len(caplog.messages) >= 2)  # a line is written when its answer has gone out
    first, second = (record.getMessage() for record in caplog.records if record.name == "dflash_trt.runtime.server")
    assert "POST /v1/completions 200" in first
    assert "output_tokens 4" in first
    assert "GET /%0aforged 404" in second
    assert "secret" not in caplog.text


def test_a_decoder_that_has_ended_is_not_healthy(
    engine: Path, chat_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(engine, chat_target, max_batch_size=1) as llm, serving(llm) as live:
        assert live.http.get("/health").status_code == 200
        monkeypatch.setattr(Decoder, "step", lambda _: 1 / 0)
        response = live.post(prompt="x", max_tokens=4)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert live.http.get("/health").status_code == 503
        events = live.post(prompt="x", max_tokens=4, stream=True)
        assert events.status_code == 500


def test_an_error_in_mid_stream_is_an_event(engine: Path, chat_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(engine, chat_target, max_batch_size=1) as llm, serving(llm) as live:
        step, count = Decoder.step, 0

        def break_at_the_third(decoder: Decoder) -> None:
            nonlocal count
            count += 1
            assert count < 3
            step(decoder)

        monkeypatch.setattr(Decoder, "step", break_at_the_third)
        events = live.events(prompt="def f(", max_tokens=50, ignore_eos=True)
        assert events[-1]["error"]["type"] == "server_error"
        assert all("choices" in event for event in events[:-1])


def test_a_port_in_use_is_one_error(live: Live) -> None:
    with pytest.raises(RequestError, match=r"192\.0\.2\.1 is not an address of this machine"):
        bind("192.0.2.1", 0)
    with pytest.raises(RequestError, match=f"port {live.port} on .* is already in use"):
        bind("127.0.0.1", live.port)
    with pytest.raises(RequestError, match=r"no-such-host\.invalid is not an address of this machine: "):
        bind("no-such-host.invalid", 0)


def test_sixteen_at_once_are_those_alone(live: Live) -> None:
    prompts = [f"def f{i}(" for i in range(16)]
    alone = [live.llm.generate(prompt, SamplingParams(max_tokens=12))[0].text for prompt in prompts]
    texts = [""] * 16

    def ask(i: int) -> None:
        for event in live.events(prompt=prompts[i], max_tokens=12, temperature=0):
            texts[i] += event["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert texts == alone
