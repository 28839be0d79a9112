# SPDX-License-Identifier: Apache-2.0
"""Answers step by step, and how they end: closed streams, interrupts and failures, of which all who wait hear."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion, FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.runtime.targets.packed_target import PackedTarget
from tests.llm.serving import LONG, PROMPTS, await_idle, await_running, greedy, within
from tests.waiting import PATIENCE


def check_stream(chunks: list[Chunk], whole: Completion) -> None:
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert all(chunk.completion is None for chunk in chunks[:-1])
    last = chunks[-1].completion
    assert last is not None
    assert (last.token_ids, last.text, last.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
    assert len(chunks) == 1 + last.steps


@pytest.mark.parametrize(
    "params", [greedy(40), greedy(40, stop=("\n",)), greedy(1), greedy(20, temperature=1.0, seed=5)]
)
def test_a_stream_adds_up_to_the_answer(llm: LLM, params: SamplingParams) -> None:
    whole = within(lambda: llm.generate(PROMPTS[2], params)[0])
    chunks = within(lambda: list(llm.stream(PROMPTS[2], params)))
    check_stream(chunks, whole)


def test_a_stream_comes_while_it_is_made_and_closing_it_cancels(llm: LLM) -> None:
    before = llm.metrics().finished.get(FinishReason.CANCELLED, 0)
    stream = llm.stream(PROMPTS[0], LONG)
    first = within(lambda: next(stream))
    assert first.completion is None
    assert llm.metrics().running == 1
    within(lambda: [next(stream) for _ in range(2)])
    within(stream.close)  # type: ignore[attr-defined]
    await_idle(llm)
    assert llm.metrics().finished[FinishReason.CANCELLED] == before + 1
    unread = llm.stream(PROMPTS[0], LONG)
    unread.close()  # type: ignore[attr-defined]
    await_idle(llm)


def test_async_streams_run_together(llm: LLM) -> None:
    async def read(prompt: str, params: SamplingParams) -> list[Chunk]:
        return [chunk async for chunk in llm.stream_async(prompt, params)]

    async def read_all() -> list[list[Chunk]]:
        tasks = [read(PROMPTS[i % 4], greedy(10 + i)) for i in range(8)]
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)

    for i, chunks in enumerate(within(lambda: asyncio.run(read_all()))):
        check_stream(chunks, within(lambda i=i: llm.generate(PROMPTS[i % 4], greedy(10 + i))[0]))


def test_cancelling_an_async_task_frees_its_slot(llm: LLM) -> None:
    async def cancel_one() -> tuple[list[Chunk], bool]:
        started = asyncio.Event()

        async def read(params: SamplingParams) -> list[Chunk]:
            chunks = []
            async for chunk in llm.stream_async(PROMPTS[0], params):
                chunks.append(chunk)
                started.set()
            return chunks

        doomed = asyncio.create_task(read(LONG))
        other = asyncio.create_task(read(greedy(25)))
        await asyncio.wait_for(started.wait(), PATIENCE)
        doomed.cancel()
        chunks = await asyncio.wait_for(other, PATIENCE)
        await asyncio.wait([doomed], timeout=PATIENCE)
        return chunks, doomed.cancelled()

    chunks, was_cancelled = within(lambda: asyncio.run(cancel_one()))
    assert was_cancelled
    await_idle(llm)
    check_stream(chunks, within(lambda: llm.generate(PROMPTS[0], greedy(25))[0]))


def test_an_async_refusal_is_raised_where_it_is_awaited(llm: LLM) -> None:
    async def ask() -> None:
        async for _ in llm.stream_async([]):
            pass

    with pytest.raises(RequestError, match="empty prompt"):
        within(lambda: asyncio.run(ask()))


def test_an_event_loop_that_ends_with_a_stream_open_harms_nobody_else(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.stream_async(PROMPTS[0], greedy(300))

    async def read_one() -> Chunk:
        return await anext(stream)

    within(lambda: loop.run_until_complete(read_one()))
    loop.close()
    assert len(within(lambda: llm.generate(PROMPTS[1], greedy(9))[0]).token_ids) == 9
    await_idle(llm)


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
        with pytest.raises(EngineError, match="this LLM is closed"):
            within(ask)
    within(own_llm.close)


def test_a_target_that_fails_is_told_to_every_waiter(own_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    works, calls = PackedTarget.verify, 0

    def fail_later(*args: Any, **settings: Any) -> object:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise RuntimeError("out of memory")
        return works(*args, **settings)

    monkeypatch.setattr(PackedTarget, "verify", fail_later)

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
            # Requests before the failure get its error; later ones find the engine closed.
            assert str(failure.value) in (
                "the decoder has failed: out of memory",
                "this LLM is closed",
            )
            assert isinstance(failure.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="this LLM is closed") as refused:
        own_llm.generate(PROMPTS[0])
    assert str(refused.value.__cause__) == "out of memory"
    within(own_llm.close)


def test_commands_behind_one_that_fails_are_answered_too(own_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object) -> None:
        time.sleep(0.2)  # meanwhile the others arrive
        raise RuntimeError("no such thing")

    monkeypatch.setattr(own_llm.backend.decoder, "add", fail)
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineError):
        pool.submit(own_llm.generate, PROMPTS, greedy(3)).result(PATIENCE)
