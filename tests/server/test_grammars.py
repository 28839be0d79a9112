# SPDX-License-Identifier: Apache-2.0
"""A grammar that takes for ever to compile holds nobody but its own client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.runtime.sampling import Grammar
from dflash_trt.server import grammars
from dflash_trt.server.grammars import GrammarThreads
from dflash_trt.server.http_error import HttpError
from tests.server.live import PATIENCE

ENDLESS, SHORT, WRONG = (Grammar(kind="regex", text=text) for text in ("endless", "short", "wrong"))


async def besiege(may_end: threading.Event, limit_seconds: Callable[[float], None]) -> None:
    def compile_grammar(grammar: Grammar) -> str:
        if grammar is WRONG:
            raise RequestError("no grammar")
        assert grammar is SHORT or may_end.wait(PATIENCE)
        return grammar.text

    threads = GrammarThreads(compile_grammar)
    limit_seconds(0.05)
    with pytest.raises(RequestError, match=r"structured_outputs: expected a regex that compiles within 0\.05 s"):
        await threads.compile(ENDLESS)
    limit_seconds(PATIENCE)
    assert await threads.compile(SHORT) == "short"
    with pytest.raises(RequestError, match="no grammar"):
        await threads.compile(WRONG)
    left = asyncio.create_task(threads.compile(ENDLESS))
    while threads.active < 2:
        await asyncio.sleep(0.001)
    left.cancel()  # the client has gone, its thread has not
    await asyncio.gather(left, return_exceptions=True)
    limit_seconds(0.05)
    with pytest.raises(HttpError, match="2 grammars are being compiled") as refusal:
        await threads.compile(SHORT)
    assert refusal.value.status == 429
    may_end.set()
    limit_seconds(PATIENCE)
    async with asyncio.timeout(PATIENCE):
        while threads.active:
            await asyncio.sleep(0.001)
    assert await threads.compile(SHORT) == "short"


def test_others_compile_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILING", 2)
    may_end = threading.Event()
    try:
        asyncio.run(besiege(may_end, lambda seconds: monkeypatch.setattr(grammars, "COMPILE_SECONDS", seconds)))
    finally:
        may_end.set()
