# SPDX-License-Identifier: Apache-2.0
"""Long prompts are tokenised within limits, in turns between clients, and no longer than their client waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.request import tokenizing
from dflash_trt.runtime.server.request.tokenizing import CHUNK_CHARACTERS, TokenizerPool
from tests.runtime.server.live import Live, bounded
from tests.waiting import PATIENCE


class CountingTokenizer:
    """The real one, which counts the characters that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def __deepcopy__(self, memo: object) -> CountingTokenizer:
        return self

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._tokenizer(text, **options)

    def get_vocab(self) -> Any:
        return self._tokenizer.get_vocab()


class HeldTokenizer(CountingTokenizer):
    """One whose calls wait until they may go on."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, text: str, **options: Any) -> Any:
        self._has_begun.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().__call__(text, **options)

    async def begun(self) -> None:
        """Waits for the first call."""
        while not self._has_begun.is_set():
            await asyncio.sleep(0.001)


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
async def test_clients_take_turns_at_tokenising(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one of ten prompts of one client is tokenised before another client's."""
    monkeypatch.setattr(tokenizing, "FEW_CHARACTERS", 0)
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    many = [asyncio.create_task(pool.encode("x", client="many")) for _ in range(10)]
    await tokenizer.begun()
    few = asyncio.create_task(pool.encode("y", client="few"))
    await asyncio.sleep(0)
    ended: list[asyncio.Task[list[int]]] = []
    for task in (*many, few):
        task.add_done_callback(ended.append)
    tokenizer.may_go_on.set()
    await asyncio.gather(*many, few)
    assert ended.index(few) == 1


@bounded
async def test_a_short_prompt_needs_no_thread_while_none_tokenises(live: Live) -> None:
    """The event loop never waits for a thread, and never tokenises beside one."""
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    longer = asyncio.create_task(pool.encode("x" * (tokenizing.FEW_CHARACTERS + 1), client="a"))
    await tokenizer.begun()
    short = asyncio.create_task(pool.encode("y", client="b"))
    await asyncio.sleep(0.01)
    assert not short.done()
    tokenizer.may_go_on.set()
    assert await short == live.llm.backend.encode("y")
    await longer
    alone = pool.encode("y", client="b")
    with pytest.raises(StopIteration) as ended:
        alone.send(None)  # without a turn of the event loop
    assert ended.value.value == await short


def test_the_tokenizers_time_is_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TOKENIZER_SECONDS", 0.0)
    tokenizer = CountingTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt: the tokenizer takes more than 0 s"):
        asyncio.run(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    assert tokenizer.num_characters == CHUNK_CHARACTERS, "one chunk"


@bounded
async def test_tokenising_ends_with_the_client(live: Live) -> None:
    tokenizer = HeldTokenizer(live.llm.backend.tokenizer)
    pool = TokenizerPool(tokenizer, 10**6)  # type: ignore[arg-type]
    task = asyncio.create_task(pool.encode("x " * 2 * CHUNK_CHARACTERS))
    await tokenizer.begun()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    tokenizer.may_go_on.set()
    last = "x " * CHUNK_CHARACTERS  # on the same thread, so after the first: counted, then tokenised
    await pool.encode(last)
    assert tokenizer.num_characters == CHUNK_CHARACTERS + 2 * len(last)
