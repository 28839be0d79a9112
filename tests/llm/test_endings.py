# SPDX-License-Identifier: Apache-2.0
"""Interrupts, closing and failures: everybody who waits hears of it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_trt.api.completion import FinishReason
from dflash_trt.errors import EngineError
from dflash_trt.llm import LLM
from tests.llm.serving import LONG, PATIENCE, PROMPTS, await_idle, await_running, greedy, within


def test_an_interrupt_cancels_what_was_asked_for(llm: LLM) -> None:
    """Ctrl-C while generate waits."""
    before = llm.metrics().finished.get(FinishReason.CANCELLED, 0)

    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def interrupt() -> None:
        await_running(llm, 4)
        signal.pthread_kill(main_thread, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[0]] * 6, LONG)
    thread.join(PATIENCE)
    await_idle(llm)
    assert llm.metrics().finished[FinishReason.CANCELLED] == before + 6


def test_closing_ends_what_is_left(own_llm: LLM) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(own_llm.generate, [PROMPTS[0]] * 6, LONG)
        streaming = pool.submit(lambda: list(own_llm.stream(PROMPTS[1], LONG)))
        await_running(own_llm, 4, waiting=3)
        within(own_llm.close)
        answers = waiting.result(PATIENCE)
        chunks = streaming.result(PATIENCE)
    assert {answer.finish_reason for answer in answers} == {FinishReason.CANCELLED}
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.finish_reason is FinishReason.CANCELLED
    assert answers[-1].ttft_seconds is None
    for ask in (lambda: own_llm.generate(PROMPTS[0]), lambda: next(own_llm.stream(PROMPTS[0]))):
        with pytest.raises(EngineError, match="expected an open LLM, found a closed one"):
            within(ask)
    within(own_llm.close)


@pytest.mark.parametrize("part", ["verify", "rollback", "embed"])
def test_a_target_that_fails_is_told_to_every_waiter(own_llm: LLM, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = own_llm.backend.session.target
    works, calls = getattr(target, part), 0

    def fail_later(*args: object, **settings: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise RuntimeError("out of memory")
        return works(*args, **settings)

    monkeypatch.setattr(target, part, fail_later)

    async def read() -> None:
        async for _ in own_llm.stream_async(PROMPTS[3], LONG):
            pass

    asks: list[Callable[[], object]] = [
        *[lambda: own_llm.generate(PROMPTS[0], LONG)] * 4,  # more than there are slots
        lambda: own_llm.generate(PROMPTS, LONG),
        lambda: list(own_llm.stream(PROMPTS[2], LONG)),
        lambda: asyncio.run(read()),
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        for future in [pool.submit(ask) for ask in asks]:
            with pytest.raises(EngineError) as failure:
                future.result(PATIENCE)
            # Who asked in time hears of it; who asked after it finds the engine closed.
            assert str(failure.value) in (
                "the decoder has failed: out of memory",
                "expected an open LLM, found a closed one",
            )
            assert isinstance(failure.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="found a closed one") as refused:
        own_llm.generate(PROMPTS[0])
    assert str(refused.value.__cause__) == "out of memory"
    within(own_llm.close)


def test_commands_behind_one_that_fails_are_answered_too(own_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object) -> None:
        time.sleep(0.2)  # meanwhile the others arrive
        raise RuntimeError("no such thing")

    monkeypatch.setattr(own_llm.backend._decoder, "add", fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineError):
        pool.submit(own_llm.generate, PROMPTS, greedy(3)).result(PATIENCE)
