# SPDX-License-Identifier: Apache-2.0
"""What one client takes leaves room for the others: places, memory of bodies, turns of the tokenizer."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from dflash_trt.runtime.server import limits
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.limits import Admission
from dflash_trt.runtime.server.tokenizing import MAX_QUEUED_PER_CLIENT, TokenizerPool
from tests.runtime.server.live import PATIENCE, Live, bounded, until

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
    """Of all clients and of each, before any of a body is read."""

    def announce(client: int) -> socket.socket:
        source = (f"127.0.0.{client}", 0)
        connection = socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE, source_address=source)
        connection.sendall(HEAD % path)
        return connection

    def is_refused(client: int) -> bool:
        with announce(client) as connection:
            return connection.recv(100).startswith(b"HTTP/1.1 429 ")

    held = [announce(1) for _ in range(limits.CONCURRENT_BODIES - 1)]
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


@bounded
async def test_turns_of_the_tokenizer(live: Live) -> None:
    pool = TokenizerPool(live.llm.backend.tokenizer, 100)
    may_go_on = threading.Event()
    order: list[str] = []

    async def ask(client: str) -> None:
        await pool.encode_chat([{"role": "user", "content": "x"}], client=client)
        order.append(client)

    pool._short.submit(may_go_on.wait, PATIENCE)
    tasks = [asyncio.create_task(ask(client)) for client in [*["one"] * 9, "other"]]
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*tasks)
    assert order.index("other") <= 2 * MAX_QUEUED_PER_CLIENT  # it is rendered, then tokenised


def test_the_client_of_a_text_is_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[str] = []
    in_turn = TokenizerPool._in_turn

    async def recorded(pool: TokenizerPool, executor: object, client: str, work: object) -> object:
        clients.append(client)
        return await in_turn(pool, executor, client, work)  # type: ignore[arg-type]

    monkeypatch.setattr(TokenizerPool, "_in_turn", recorded)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", chat)):
        assert live.post(path, **body, max_tokens=1).status_code == 200
    for body in ({"prompt": "x"}, chat):
        assert live.post("/tokenize", **body).status_code == 200
    assert clients == ["127.0.0.1"] * 6
