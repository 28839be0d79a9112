# SPDX-License-Identifier: Apache-2.0
"""Streams to clients that read slowly, leave, or do not read at all; and the way of a token to a stream."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from dflash_trt.errors import EngineError
from dflash_trt.runtime.server.answer import event_stream
from dflash_trt.runtime.server.answer.event_stream import EventStream
from dflash_trt.runtime.server.answer.inbox import Inbox
from dflash_trt.runtime.server.disconnect import ClientDisconnected
from tests.runtime.server.live import Live, bounded
from tests.waiting import PATIENCE, until


class Call:
    """One that a stream answers, whose client reads while `may_read` is set, one message every turn."""

    def __init__(self) -> None:
        self.sent = b""
        self.may_read, self.may_leave = asyncio.Event(), asyncio.Event()
        self.stream = EventStream()
        self.left: list[object] = []
        held = ExitStack()
        held.push(lambda *error: self.left.append(error[1]))
        self.stream.hold(held)
        self.scope: dict[str, Any] = {"dflash_trt.log_fields": {}}

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        self.sent += message.get("body", b"")
        await asyncio.sleep(0)

    async def receive(self) -> dict[str, str]:
        await self.may_leave.wait()
        return {"type": "http.disconnect"}

    def put(self, number: int) -> None:
        for index in range(number):
            self.stream.put({"index": index, "text": "x" * 1000})

    async def answer(self) -> None:
        await self.stream(self.scope, self.receive, self.send)


@pytest.mark.parametrize("limit", [None, "MAX_UNREAD_BYTES", "MAX_ALL_UNREAD_BYTES"])
@bounded
async def test_an_unread_response(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its place back before anything is read, and is cut at a limit."""
    if limit is not None:
        monkeypatch.setattr(event_stream, limit, 10_000)
    call = Call()
    answer = asyncio.create_task(call.answer())
    await asyncio.sleep(0)
    call.put(50)
    call.stream.end()
    assert len(call.left) == 1
    call.may_read.set()
    await answer
    assert call.sent.count(b'"index"') == 50 if limit is None else call.sent.count(b'"index"') < 11
    assert (b"the client is too slow" in call.sent) == (limit is not None)
    assert call.sent.endswith(b"data: [DONE]\n\n")
    assert EventStream.all_unread_bytes == 0
    assert len(call.left) == 1


@bounded
async def test_what_was_read_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_UNREAD_BYTES", 25_000)
    call = Call()
    call.may_read.set()
    answer = asyncio.create_task(call.answer())
    for number in (20, 20, 10):
        call.put(number)
        for _ in range(10):
            await asyncio.sleep(0)
    call.stream.end()
    await answer
    assert call.sent.count(b'"index"') == 50


@bounded
async def test_a_client_that_leaves_is_not_counted_any_more() -> None:
    call = Call()
    answer = asyncio.create_task(call.answer())
    call.put(50)
    await asyncio.sleep(0)
    assert EventStream.all_unread_bytes > 50_000
    call.may_leave.set()
    await answer
    assert EventStream.all_unread_bytes == 0
    assert isinstance(call.left[0], ClientDisconnected)
    assert call.scope["dflash_trt.log_fields"] == {"client": "disconnected"}
    call.put(1)  # it was on its way
    assert EventStream.all_unread_bytes == 0


@pytest.mark.parametrize("has_begun", [False, True])
@bounded
async def test_an_error_before_the_first_event_is_raised(has_begun: bool) -> None:
    call, error = Call(), EngineError("broken")
    call.put(has_begun)
    call.stream.end(error)
    assert call.left == [error]
    if not has_begun:
        with pytest.raises(EngineError, match="broken"):
            await call.stream.begin()
        return
    await call.stream.begin()
    call.may_read.set()
    await call.answer()
    assert b'"message":"broken"' in call.sent


def test_one_wake_up_for_all_that_has_come() -> None:
    """The items come from another thread while the event loop is busy."""
    received: list[int] = []

    async def receive_all() -> int:
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        with patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as wake_up:
            for begin in (0, 100):
                items = range(begin, begin + 100)
                thread = threading.Thread(
                    target=lambda items: [*map(inbox.sender(received.append), items)], args=[items]
                )
                thread.start()
                thread.join()
                while len(received) < begin + 100:
                    await asyncio.sleep(0)
            return wake_up.call_count

    assert asyncio.run(receive_all()) == 2
    assert received == list(range(200))


def test_the_decoder_never_waits_for_the_event_loop(live: Live) -> None:
    """A whole answer is computed while the loop stands still; its events are then still one for each step."""
    loop_is_free, loop_stands = threading.Event(), threading.Event()
    finished = live.llm.metrics().finished.get("length", 0)  # type: ignore[call-overload]
    submit: Any = type(live.llm.backend).submit

    def submit_and_stand(backend: Any, request: Any) -> None:
        submit(backend, request)
        loop_stands.set()
        assert loop_is_free.wait(PATIENCE)

    with patch.object(type(live.llm.backend), "submit", submit_and_stand):
        events: list[Any] = []
        body = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_steps": True}
        client = threading.Thread(target=lambda: events.extend(live.events(**body)))
        client.start()
        assert loop_stands.wait(PATIENCE)
        until(lambda: live.llm.metrics().finished.get("length", 0) == finished + 1)  # type: ignore[call-overload]
        loop_is_free.set()
        client.join(PATIENCE)
    steps = [choice["steps"] for event in events for choice in event["choices"]]
    assert all(len(each) == 1 for each in steps)
    assert sum(len(step["tokens"]) for each in steps for step in each) == 40


def test_a_stream_over_http_1_0_has_no_chunks(live: Live) -> None:
    body = b'{"prompt": "def f(", "max_tokens": 20, "temperature": 0, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    with live.connect() as connection:
        connection.sendall(head + body)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    _, _, events = received.partition(b"\r\n\r\n")
    *frames, done, rest = events.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(frame.startswith(b"data: {") for frame in frames)
